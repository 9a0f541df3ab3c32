"""An engine that does what its calls' names say: the child of the worker's tests."""

import contextlib
import os
import queue
import signal
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from langchain_art.errors import ConfigError, PromptTooLong
from langchain_art_server.backends.ipc.channel import Channel, EngineCall, import_function

#: In a learner's environment: its other ranks are forked (`serve_learner`).
FORKED = "ART_TEST_FORKED_RANKS"


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """The child: does what the calls' names say."""
    channel.listen()
    state: dict[str, Any] = {}
    waiting: list[EngineCall] = []
    if config.get("dies_at_start") and Path(config["dies_at_start"]).exists():
        os._exit(7)
    while True:
        with contextlib.suppress(queue.Empty):
            _answer(channel, channel.inbox.get(timeout=0.01), config, state, waiting)
        for call in [call for call in waiting if call.cancelled]:
            waiting.remove(call)
            state["cancelled"] = state.get("cancelled", 0) + 1
        channel.flush()


def serve_learner(channel: Channel, config: dict[str, Any]) -> None:
    """The learner's child, which looks for the folder of temporary files once more.

    It is forked, and what was imported before may have found another.
    """
    tempfile.tempdir = None
    if FORKED in os.environ:
        _fork_ranks(channel, config["options"]["ranks"])
    import_function("langchain_art_server.backends.peft.child:serve")(channel, config)


def _fork_ranks(channel: Channel, count: int) -> None:
    """Have the other ranks forked before there are threads, in place of programs of their own.

    A program imports for five seconds what this process has imported.
    """
    from langchain_art_server.backends.peft.distributed import rank_zero

    made: dict[int, rank_zero.OtherRank] = {}
    mine = [channel.socket]
    for rank in range(1, count):
        ours, theirs = socket.socketpair()
        mine.append(ours)
        if (pid := os.fork()) == 0:
            for one in mine:
                one.close()
            try:
                rank_zero.run(theirs, None)
            finally:
                os._exit(1)
        theirs.close()
        process: Any = SimpleNamespace(
            kill=partial(os.kill, pid, signal.SIGKILL),
            wait=lambda pid=pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),
        )
        made[rank] = rank_zero.OtherRank(rank, ours, process)
    rank_zero.OtherRank.started = made.pop  # type: ignore[method-assign]


def _answer(
    channel: Channel,
    call: EngineCall,
    config: dict[str, Any],
    state: dict[str, Any],
    waiting: list[EngineCall],
) -> None:
    match call.method:
        case "start" if "refuse" in config:
            channel.error(call, ConfigError(config["refuse"]))
        case "start":
            channel.result(call, {"model": "m", "pid": os.getpid()})
        case "sleep" | "wake":
            channel.result(call, None)
        case "echo":
            channel.result(call, call.params)
        case "remember":
            state["value"] = call.params["value"]
            channel.result(call, None)
        case "recall":
            channel.result(call, state.get("value"))
        case "count":
            for index in range(call.params["n"]):
                channel.event(call, index)
            channel.result(call, "done")
        case "wait":
            waiting.append(call)
            channel.event(call, "waiting")
        case "hang":
            time.sleep(3600)
        case "cancelled":
            channel.result(call, state.get("cancelled", 0))
        case _:
            _fail(channel, call)


def _fail(channel: Channel, call: EngineCall) -> None:
    match call.method:
        case "raise":
            channel.error(call, PromptTooLong("too long", param="messages"))
        case "bug":
            channel.error(call, ZeroDivisionError("by zero"))
        case "die_unless" if Path(call.params["file"]).exists():
            channel.result(call, "alive")
        case "die_unless":
            Path(call.params["file"]).touch()
            os._exit(9)
        case "event_then_die":
            channel.event(call, "first")
            channel.flush()
            os._exit(9)
        case _:
            os._exit(9)

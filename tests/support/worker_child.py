"""An engine that does what its calls' names say: the child of the worker's tests."""

import contextlib
import os
import queue
import tempfile
import time
from pathlib import Path
from typing import Any

from langchain_art.errors import ConfigError, PromptTooLong
from langchain_art_server.backends.ipc.channel import Channel, EngineCall, import_function


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
    import_function("langchain_art_server.backends.peft.child:serve")(channel, config)


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

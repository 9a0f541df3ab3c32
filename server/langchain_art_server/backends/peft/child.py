"""The loop of the learner's process: one call of the parent after the other.

Torch is imported when the first call, ``start``, makes the process's `LearnerCore`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import LoraConfig
from langchain_art_server.backends.base import Demonstration
from langchain_art_server.backends.ipc.channel import Channel, EngineCall, import_function
from langchain_art_server.backends.ipc.child_process import NodeAddress, connect
from langchain_art_server.backends.ipc.step_codec import read_rows, unpack_step

if TYPE_CHECKING:
    from langchain_art_server.backends.peft.learner_core import LearnerCore

log = logging.getLogger(__name__)


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Answer calls until the process ends; the first one is ``start``.

    `config` has `core`, the function that makes the core (``module:function``), and `options`.
    """
    channel.listen()
    methods: dict[str, Callable[[EngineCall], Any]] = {}
    while True:
        call = channel.inbox.get()
        try:
            if call.method == "start":
                core = _make_core(config, call.params["beside"])
                methods, payload = _methods(core, channel), core.info
            elif call.cancelled:
                raise ArtError("The call was cancelled before it began.")
            else:
                payload = methods[call.method](call)
            answer = partial(channel.result, call, payload)
        except Exception as error:  # sent to the caller, whatever it is
            log.debug("The call %s failed.", call.method, exc_info=True)
            error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold tensors
            answer = partial(channel.error, call, error)
        # Before the answer, after which a sampler may take the memory.
        if methods:
            from langchain_art_server.backends.models.device import free_cache  # noqa: PLC0415

            free_cache()
        answer()
        channel.flush()


def _make_core(config: dict[str, Any], beside: Sequence[Sequence[Any]]) -> LearnerCore:
    # Before the imports, which take longer than the others may wait.
    connections = [connect(NodeAddress(*one)) for one in beside]
    try:
        make = import_function(config["core"])
    except ImportError as error:
        raise ConfigError(
            f"{sys.executable} lacks what learns: {error}. Install it there, or give the setting "
            "`python` of [learner] the path of one that has it (docs/gpu.md)."
        ) from error
    more = {"beside": connections} if connections else {}
    return make(**config["options"], **more)


def _methods(core: LearnerCore, channel: Channel) -> dict[str, Callable[[EngineCall], Any]]:
    """The methods that the parent may call. Imports come after the core's: Unsloth patches them."""
    from langchain_art_server.backends.peft.learner_core import token_turns  # noqa: PLC0415

    def init_adapter(call: EngineCall) -> None:
        core.init_adapter(Path(call.params["out"]), LoraConfig(**call.params["lora"]))

    def progress(call: EngineCall, fraction: float, message: str) -> None:
        if call.cancelled:
            raise ArtError("The step was cancelled; nothing was published.")
        channel.event(call, {"progress": fraction, "message": message})
        channel.flush()

    def step(call: EngineCall) -> dict[str, float]:
        return core.step(unpack_step(call.params), partial(progress, call))

    def logprobs(call: EngineCall) -> None:
        p = call.params
        adapter = p["adapter"] and Path(p["adapter"])
        numbers = core.logprobs(adapter, read_rows(Path(p["rows"])), partial(progress, call))
        with Path(p["out"]).open("wb") as file:
            np.save(file, np.concatenate(numbers), allow_pickle=False)

    def tokenize(call: EngineCall) -> list[str | dict[str, Any]]:
        turns = [Demonstration(**turn) for turn in call.params["turns"]]
        found = token_turns(core.name, core.base, turns, call.params["template"])
        return [one if isinstance(one, str) else vars(one) for one in found]

    def settle(_call: EngineCall) -> None:
        """Calls are done one after the other: those before it have ended."""

    return {one.__name__: one for one in (init_adapter, step, logprobs, tokenize, settle)}

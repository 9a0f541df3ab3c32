"""vLLM as the sampler: a ``vllm serve`` in a Python environment of its own.

The gateway talks to a child process (`vllm.host`), as to that of every engine; it starts vLLM.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any, ClassVar

from langchain_art.errors import ConfigError
from langchain_art.gpu_memory import gpus
from langchain_art_server.backends.chat.tool_calls.formats import FORMATS, names_of
from langchain_art_server.backends.ipc.child_process import EnginePlace
from langchain_art_server.backends.ipc.process_sampler import ProcessSampler
from langchain_art_server.config import Settings

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class VllmSampler(ProcessSampler):
    """A `Sampler` (see `base`) over a child process that holds vLLM.

    Reads of the settings the model, device, dtype, context, `lora` and `sampler`.

    Raises ConfigError: CUDA_VISIBLE_DEVICES names too few GPUs, or `tool_format` no format.

    Args:
        settings: the server's.
        replica: which of several it is, from 0; None: the only one. Its GPUs follow those of the
            replica before, and its log is ``vllm-{replica}.log``.
    """

    target: ClassVar[str] = "langchain_art_server.backends.vllm.host:serve"

    def __init__(
        self, settings: Settings, replica: int | None = None, place: EnginePlace | None = None
    ) -> None:
        assert settings.sampler.kind == "vllm"
        if (form := settings.sampler.tool_format) is not None and form not in FORMATS:
            raise ConfigError(
                f"[sampler] tool_format: got {form!r}, expected one of these formats: "
                f"{names_of(FORMATS.values())}"
            )
        no_cards_here = settings.device == "cpu" or place is not None
        # The GPUs as they are before the learner starts: a restart gets the same share.
        config: dict[str, Any] = {"replica": replica, "cards": [] if no_cards_here else gpus()}
        env = {} if no_cards_here or replica is None else {_VISIBLE: _gpus(settings, replica)}
        super().__init__(settings, replica, place, config=config, env=env)

    @staticmethod
    def gpus(settings: Settings) -> int:
        """See `ProcessSampler.gpus`."""
        assert settings.sampler.kind == "vllm"
        return math.prod(parallel_sizes(settings.sampler.args))

    async def sleep(self) -> None:
        """Move the weights to the host's memory and drop the KV cache (vLLM's sleep, level 1)."""
        await self.call("sleep", {})
        self.may_start.clear()  # the learner has the memory that a start needs

    async def wake(self) -> None:
        """Take weights and adapters back to the device. See `Sampler.wake`."""
        self.may_start.set()
        await self.call("wake", {})


def parallel_sizes(args: tuple[str, ...]) -> tuple[int, int]:
    """Number of GPUs over which vLLM spreads the model, and of its copies. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for short, kind in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        names = (f"--{kind}-parallel-size", f"--{kind}_parallel_size", f"-{short}")
        parser.add_argument(*names, dest=kind, type=int, default=1)
    try:
        found = vars(parser.parse_known_args(args)[0])
    except argparse.ArgumentError as error:
        raise ConfigError(f"[sampler] args: {error}") from error
    return found["tensor"] * found["pipeline"], found["data"]


def _gpus(settings: Settings, replica: int) -> str:
    """The GPUs of a replica, as CUDA_VISIBLE_DEVICES has them."""
    each, replicas = VllmSampler.gpus(settings), settings.sampler.replicas
    needed = each * replicas
    named = [one.strip() for one in os.environ.get(_VISIBLE, "").split(",") if one.strip()]
    if named and len(named) < needed:
        raise ConfigError(
            f"got {_VISIBLE}={','.join(named)}, expected at least {needed} GPUs for [sampler] "
            f"replicas = {replicas} of {each} each; name more, or lower replicas"
        )
    visible = named or [str(number) for number in range(needed)]
    return ",".join(visible[replica * each : (replica + 1) * each])

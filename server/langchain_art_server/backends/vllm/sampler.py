"""vLLM as the sampler: a ``vllm serve`` in a Python environment of its own.

The gateway talks to a child process (`vllm.host`) over the same channel as to the embedded sampler;
that process starts and ends vLLM. Restarts, resent calls and reloaded adapters are handled by
`ipc.worker` and `ipc.process_sampler`, as for every engine.
"""

from __future__ import annotations

from typing import ClassVar

from langchain_art_server.backends.ipc.process_sampler import ProcessSampler


class VllmSampler(ProcessSampler):
    """A `Sampler` (see `base`) over a child process that holds vLLM.

    Reads of the settings the model, device, dtype, context, `lora` and `sampler`.
    """

    target: ClassVar[str] = "langchain_art_server.backends.vllm.host:serve"

    async def sleep(self) -> None:
        """Move the weights to the host's memory and drop the KV cache (vLLM's sleep, level 1)."""
        await self.worker.call("sleep", {})
        self.worker.may_start.clear()  # the learner has the memory that a start needs

    async def wake(self) -> None:
        """Take weights and adapters back to the device. See `Sampler.wake`."""
        self.worker.may_start.set()
        await self.worker.call("wake", {})

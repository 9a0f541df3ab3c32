"""vLLM as the sampler: a real ``vllm serve`` in an environment of its own.

The gateway talks to a process of ours (`vllm_host`), over the same channel as to the embedded
sampler; that process holds vLLM. So a dead vLLM is started again, calls that had no answer are sent
again, and loaded adapters are loaded again, by the one machinery (`worker`).
"""

from __future__ import annotations

from typing import ClassVar

from langchain_art_server.backends.embedded.sampler import TransformersSampler


class VllmSampler(TransformersSampler):
    """A `Sampler` (see `base`) over a child process that holds vLLM.

    Args:
        settings: the server's; of them the model, device, dtype, context, `lora` and `engine` are
            used.
    """

    target: ClassVar[str] = "langchain_art_server.backends.vllm.host:serve"

    async def sleep(self) -> None:
        """Weights go to the host's memory, the cache is dropped (vLLM's sleep, level 1)."""
        await self.worker.call("sleep", {})

    async def wake(self) -> None:
        """Weights and adapters come back. See `Sampler.wake`."""
        await self.worker.call("wake", {})

"""The process that holds vLLM, with a rule in the place of chance, and a record of its own.

The logprobs are the model's own: vLLM reports those from before its logits processors, which for a
call at temperature 1 are the ones that would have been sampled from.
"""

from pathlib import Path
from typing import Any

from langchain_art_server.backends.chat.sampler_host import ChatCall
from langchain_art_server.backends.ipc.channel import Channel
from langchain_art_server.backends.vllm import host
from langchain_art_server.backends.vllm.adapter_copies import CopiedAdapter
from langchain_art_server.backends.vllm.client import Completion
from langchain_art_server.backends.vllm.process import VllmProcess
from tests.support.rule_model.rules import note, reply_to


class LedVllm(VllmProcess):
    """vLLM with the processor that leads."""

    def command(self) -> list[str]:
        led = ["--logits-processors", "tests.support.rule_model.vllm_led:Led"]
        return [*super().command(), *led, "--logprobs-mode", "raw_logprobs"]

    def _environment(self) -> dict[str, str]:
        return super()._environment() | {"PYTHONPATH": str(Path(__file__).parents[3])}


class RuleHost(host.VllmHost):
    """Leads every call by `rules.reply_to`."""

    async def _complete(self, chat: ChatCall[CopiedAdapter], body: dict[str, Any]) -> Completion:
        request = chat.request
        said = [*self._template._encode(reply_to(request)), min(self._eos)]
        drawn = await super()._complete(chat, body | {"vllm_xargs": {"led": said}})
        assert drawn.token_ids == said[: len(drawn.token_ids)]
        note(
            request,
            prompt_token_ids=drawn.prompt_ids,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            finish=drawn.finish,
            text=self._template.text(drawn.token_ids),
        )
        return drawn


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of the child, in the place of `vllm.host.serve`."""
    host.VllmProcess = LedVllm  # type: ignore[misc]
    host.VllmHost = RuleHost  # type: ignore[misc]
    host.serve(channel, config)

"""The sampler's process with a rule in the place of chance, and a record of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from langchain_art_server.backends.chat.sampler_host import ChatCall
from langchain_art_server.backends.embedded import process, scheduler, token_sampler
from langchain_art_server.backends.embedded.multi_lora import RoutedAdapter
from langchain_art_server.backends.embedded.token_sampler import SequenceState
from langchain_art_server.backends.ipc.channel import Channel
from tests.support.rule_model.rules import note, reply_to


@dataclass
class Led(token_sampler.SamplingState):
    """A row whose tokens are known beforehand."""

    tokens: list[int] = field(default_factory=list[int])
    drawn: int = 0


class RuleSampler(token_sampler.TokenSampler):
    """Samples the tokens that the rule wants; their logprobs are the model's."""

    def __init__(self, draws: Sequence[token_sampler.SamplingState], device: torch.device) -> None:
        super().__init__(draws, device)
        self._greedy = None  # a led row is led at temperature 0 too
        self._led = [(row, draw) for row, draw in enumerate(draws) if isinstance(draw, Led)]

    def _truncate(self, weights: Tensor) -> Tensor:
        left = super()._truncate(weights)
        for row, draw in enumerate(self._cut_states):  # what the rule wants is kept
            if isinstance(draw, Led):
                token = draw.tokens[draw.drawn]
                left[row, token] = weights[row, token]
        return left

    def _invert(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        ids, total = super()._invert(weights)
        for row, draw in self._led:
            token = draw.tokens[draw.drawn]
            if draw.logits_processor is not None and not weights[row, token] > 0:
                raise RuntimeError(f"the rule breaks the grammar at token {draw.drawn}: {draw}")
            ids[row] = token
            draw.drawn += 1
        return ids, total


class RuleHost(process.TransformersHost):
    """Leads every call by `rules.reply_to`."""

    def _prepare_sampling(
        self, *call: Any
    ) -> tuple[ChatCall[RoutedAdapter], token_sampler.SamplingState]:
        chat, state = super()._prepare_sampling(*call)
        tokens = [*self._template._encode(reply_to(chat.request)), min(self._eos)]
        return chat, Led(**vars(state), tokens=tokens)

    def _end(self, chat: ChatCall[RoutedAdapter], sequence: SequenceState) -> None:
        note(
            chat.request,
            prompt_token_ids=sequence.prompt,
            token_ids=sequence.out,
            logprobs=sequence.logprobs,
            finish=sequence.finish,
            text=self._template.text(sequence.out),
        )
        super()._end(chat, sequence)


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of the child, in the place of `embedded.process.serve`."""
    scheduler.TokenSampler = RuleSampler  # type: ignore[misc]
    process.TransformersHost = RuleHost  # type: ignore[misc]
    process.serve(channel, config)

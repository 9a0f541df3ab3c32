"""The sampler's process with a rule in the place of chance, and a record of its own.

Each call that ends is appended to the file that ``RULE_JOURNAL`` names, as the engine knew it: a
witness that neither the gateway nor the client has a hand in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from langchain_art_server.backends.embedded import process, scheduler, token_sampler
from langchain_art_server.backends.ipc.channel import Call, Channel
from tests.support.rule_model.rules import reply_to


@dataclass
class Led(token_sampler.Draw):
    """A row whose tokens are known beforehand."""

    tokens: list[int] = field(default_factory=list[int])
    drawn: int = 0


class RuleChooser(token_sampler.Chooser):
    """Chooses the tokens that the rule wants; their logprobs are the model's."""

    def __init__(self, draws: Sequence[token_sampler.Draw], device: torch.device) -> None:
        super().__init__(draws, device)
        self._greedy = None  # a led row is led at temperature 0 too
        self._led = [(row, draw) for row, draw in enumerate(draws) if isinstance(draw, Led)]

    def _invert(self, weights: Tensor) -> Tensor:
        ids = super()._invert(weights)
        for row, draw in self._led:
            token = draw.tokens[draw.drawn]
            if draw.constraint is not None and not weights[row, token] > 0:
                raise RuntimeError(f"the rule breaks the grammar at token {draw.drawn}: {draw}")
            ids[row] = token
            draw.drawn += 1
        return ids


class RuleHost(process.SamplerHost):
    """Leads every call by `rules.reply_to`."""

    journal = Path(os.environ.get("RULE_JOURNAL", os.devnull))

    def _chat(self, call: Call) -> None:
        super()._chat(call)
        running = next(r for r in self._running.values() if r.call is call)
        try:
            said = reply_to(running.request)
        except Exception:
            self._running.pop(running.job)
            self.engine._waiting.remove(running.job)
            raise
        tokens = [*self._format._encode(said), min(self._eos)]
        draw = running.job.draw
        running.job.draw = Led(draw.sampling, draw.rng, draw.constraint, tokens)

    def _end(self, running: process._Running) -> None:
        job = running.job
        line: dict[str, Any] = {
            "id": running.request.id,
            "adapter": running.request.adapter,
            "messages": running.request.messages,
            "prompt_token_ids": job.prompt,
            "token_ids": job.out,
            "logprobs": job.logprobs,
            "finish": job.finish,
            "text": self._format.text(job.out),
        }
        with self.journal.open("a") as journal:
            journal.write(json.dumps(line) + "\n")
        super()._end(running)


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of the child, in the place of `sampler_process.serve`."""
    scheduler.Chooser = RuleChooser  # type: ignore[misc]
    process.SamplerHost = RuleHost  # type: ignore[misc]
    process.serve(channel, config)

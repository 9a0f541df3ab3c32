"""The held-out reward of an adapter: exact, where drawn replies would make it noisy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import AutoTokenizer

from examples.triage.tickets import DEPARTMENTS, Ticket
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.learner_core import LearnerCore


class Judge:
    """The probability of the right reply, where one of four is drawn at temperature 1.

    Each reply has a first token that no other one has. After all that precedes it, the
    probabilities of these four tokens, divided by their sum, are those that the agent's schema
    leaves to the sampler.

    Args:
        base: folder of the base model.
        replies: of the departments, in their order.
        system: the system prompt.
        held_out: messages, whose mean counts.
    """

    def __init__(
        self, base: Path, replies: Sequence[str], system: str, held_out: Sequence[Ticket]
    ) -> None:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(base)
        ends: list[list[int]] = [
            tokenizer(one, add_special_tokens=False)["input_ids"] for one in replies
        ]
        apart = next(at for at, ids in enumerate(zip(*ends, strict=False)) if len(set(ids)) > 1)
        if len({ids[apart] for ids in ends}) != len(ends):
            raise ValueError(f"got {ends}, expected replies that one token tells apart")
        self._rows: list[Row] = []
        for ticket in held_out:
            asked = [("system", system), ("user", ticket.message)]
            text = tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in asked],
                tokenize=False,
                add_generation_prompt=True,
            )
            prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            for ids in ends:
                tokens = [*prompt, *ids[: apart + 1]]
                nothing = [0.0] * len(tokens)
                self._rows.append(Row(tokens, [0] * (len(tokens) - 1) + [1], nothing, nothing))
        self._right = [DEPARTMENTS.index(ticket.department) for ticket in held_out]
        self._core = LearnerCore(str(base), "cpu", "float32")

    def mean(self, adapter: Path) -> float:
        """The mean over the held-out messages."""
        found = self._core.logprobs(adapter, self._rows)
        chances = np.exp([row[-1] for row in found]).reshape(len(self._right), -1)
        right = chances[np.arange(len(self._right)), self._right]
        return float((right / chances.sum(axis=1)).mean())

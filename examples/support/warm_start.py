"""The supervised warm start of a small model: first to copy, then to imitate conversations.

Copying what stands earlier in the context is a skill that most of the tasks cannot do without, and
in a small model it comes late and at once. Repeated random tokens bring it about in some hundred
cheap steps; learned from conversations alone it takes several times as long.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import DynamicCache, Qwen3ForCausalLM

CONTEXT_WEIGHT = 0.1
COPY_WEIGHT = 0.1
WARMUP_STEPS = 50
COPY_ROWS = 64
COPY_LENGTH = 32
_BATCHES_PER_BUCKET = 16


@dataclass(frozen=True)
class WarmStart:
    """How much to train.

    Attributes:
        steps: Optimizer steps on conversations; the learning rate falls along a cosine to 2 %.
        copy_steps: Optimizer steps on repeated random tokens before them, at the peak rate. With 0,
            conversations are all that is trained on.
        batch: Conversations in a step.
        lr: Peak learning rate; each of the two phases warms up to it over 50 steps.
        seed: Seed of the weights, of the random tokens and of the order of the conversations.
    """

    steps: int = 1200
    copy_steps: int = 150
    batch: int = 32
    lr: float = 3e-3
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """A rendered conversation: its tokens, and for each whether the assistant said it."""

    token_ids: list[int]
    said: list[bool]


def _token_losses(
    model: Qwen3ForCausalLM, hidden: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    logits = model.lm_head(hidden)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(
        targets.shape
    )


def copy_loss(model: Qwen3ForCausalLM, n_rows: int, first_id: int) -> torch.Tensor:
    """Loss on the second half of rows of equal halves; no token below `first_id` is drawn."""
    half = torch.randint(first_id, model.config.vocab_size, (n_rows, COPY_LENGTH))
    rows = torch.cat([half, half], dim=1)
    hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
    return _token_losses(model, hidden[:, COPY_LENGTH - 1 :], rows[:, COPY_LENGTH:]).mean()


def imitation_loss(
    model: Qwen3ForCausalLM, batch: list[Example], n_shared: int
) -> tuple[torch.Tensor, float]:
    """Weighted loss of a batch, and the mean loss of the assistant's tokens in nats.

    Args:
        model: The model to train.
        batch: Conversations.
        n_shared: Number of first tokens that all of them share (system prompt and tools). They are
            run through the model once for the whole batch, which saves half of the time, and bear
            no loss.
    """
    length = max(len(example.token_ids) for example in batch)
    pads = [length - len(example.token_ids) for example in batch]
    ids = torch.tensor(
        [example.token_ids + [0] * pad for example, pad in zip(batch, pads, strict=True)]
    )
    said = torch.tensor(
        [example.said + [False] * pad for example, pad in zip(batch, pads, strict=True)]
    )
    real = torch.tensor([[True] * (length - pad) + [False] * pad for pad in pads])
    cache = DynamicCache()
    model.model(input_ids=ids[:1, : n_shared - 1], past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = layer.keys.expand(len(batch), -1, -1, -1)
        layer.values = layer.values.expand(len(batch), -1, -1, -1)
    hidden = model.model(
        ids[:, n_shared - 1 : -1], past_key_values=cache, use_cache=True
    ).last_hidden_state
    losses = _token_losses(model, hidden, ids[:, n_shared:])
    said, real = said[:, n_shared:], real[:, n_shared:]
    weights = torch.where(said, 1.0, CONTEXT_WEIGHT) * real
    return (losses * weights).sum() / weights.sum(), losses.detach()[said].mean().item()


def _batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless shuffled batches, each of conversations of about one length."""
    bucket = size * _BATCHES_PER_BUCKET
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order), bucket):
            part = sorted(order[start : start + bucket], key=lambda example: len(example.token_ids))
            batches = [part[at : at + size] for at in range(0, len(part), size)]
            rng.shuffle(batches)
            yield from batches


def _shared_prefix(sequences: list[list[int]]) -> int:
    """Number of first tokens that all sequences have in common."""
    first, last = min(sequences), max(sequences)
    pairs = enumerate(zip(first, last, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(last)))


class _Optimizer:
    """AdamW for one phase, with a warm-up and either a constant rate or a cosine to 2 %."""

    def __init__(self, model: Qwen3ForCausalLM, lr: float, decay_steps: int | None) -> None:
        def factor(step: int) -> float:
            progress = min(step / decay_steps, 1.0) if decay_steps else 0.0
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            return min((step + 1) / WARMUP_STEPS, 1.0) * (0.02 + 0.98 * cosine)

        self._parameters = list(model.parameters())
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._adamw, factor)

    def step(self, loss: torch.Tensor) -> None:
        self._adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adamw.step()
        self._schedule.step()


def warm_start(
    model: Qwen3ForCausalLM, examples: list[Example], plan: WarmStart, first_id: int
) -> None:
    """Train `model` in place, printing the loss every 100 steps.

    Args:
        model: The model, freshly initialised.
        examples: Conversations. The tokens that all of them begin with are computed once a step.
        plan: How much to train.
        first_id: The first token id that is no special token.
    """
    started = time.process_time()

    def show(phase: str, step: int, steps: int, loss: float) -> None:
        if step % 100 == 0 or step == steps:
            seconds = time.process_time() - started
            print(f"{phase} {step}/{steps}: loss {loss:.4f}, {seconds:.0f} cpu s", flush=True)

    model.train()
    optimizer = _Optimizer(model, plan.lr, decay_steps=None)
    for step in range(1, plan.copy_steps + 1):
        loss = copy_loss(model, COPY_ROWS, first_id)
        optimizer.step(loss)
        show("copy", step, plan.copy_steps, loss.item())
    # The moments of the first phase are far too small for the gradients of the second: start anew.
    optimizer = _Optimizer(model, plan.lr, decay_steps=plan.steps)
    n_shared = min(
        _shared_prefix([example.token_ids for example in examples]),
        *(example.said.index(True) for example in examples),
    )
    batches = _batches(examples, plan.batch, random.Random(plan.seed))
    for step in range(1, plan.steps + 1):
        loss, assistant_loss = imitation_loss(model, next(batches), n_shared)
        if plan.copy_steps:
            loss = loss + COPY_WEIGHT * copy_loss(model, COPY_ROWS // 4, first_id)
        optimizer.step(loss)
        show("imitate", step, plan.steps, assistant_loss)
    model.eval()

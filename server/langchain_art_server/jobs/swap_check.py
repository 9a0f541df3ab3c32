"""The check of a hot swap: does the sampler answer with the new version's weights?

A sampler that ignores adapters or keeps an old one, and a learner that does not save what it
trained, show no error: there are tokens, rewards and a loss, but nothing is learned. Both are found
here, before the version is published, by its answers to one prompt of the training batch; and its
weights are finite, and no further from its parent's than a step can go.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pybase64 import b64encode_as_string
from safetensors import SafetensorError, safe_open

from langchain_art.errors import ArtError, EngineUnavailable
from langchain_art.wire.policies import logprob_tolerance
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import ChatEngine, ChatReply, ChatRequest, Sampler, Sampling
from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.storage.tables import CallRecord

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Tokens of the answer that are compared if the first does not differ, and logprobs at each.
TOKENS, TOP = 8, 8
#: Norm of a gradient below which an optimizer may leave every weight as it is (Adam's eps is 1e-8).
LEAST_NORM = 1e-6


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter by its name in the sampler and its directory for the learner."""

    name: str
    path: Path


@dataclass(frozen=True)
class SwapCheck:
    """Asks the engines of a sampler what a step did to its version's answers.

    `call` is one that the step learned from, `parent` the version that the step started from, and
    `child` the new one.
    """

    sampler: Sampler
    learner: PeftLearner
    call: CallRecord
    parent: NamedAdapter
    child: NamedAdapter

    async def before(self) -> dict[ChatEngine, ChatReply]:
        """The parent's answer by each engine; one of several that dies meanwhile is left out."""
        return await self._of_each(lambda engine: self._ask(engine, self.parent))

    async def after(self, before: Mapping[ChatEngine, ChatReply], grad_norm: float) -> float:
        """Measure how much the new version's answers differ from its parent's.

        Clients wait for the new version, so only one token is sampled first, which is enough as a
        rule. If the difference is within rounding, more tokens are sampled, and the learner
        computes the difference that there should be, from the parent and from the base model: in
        half precision a small step can be less than the rounding. An engine that dies meanwhile,
        one of several, is left out: what it loads when it is back is probed then.

        Args:
            before: the result of `before`, without the engines that were not there then. Those that
                are there now have loaded both versions.
            grad_norm: norm of the step's gradient; 0 where `TrainConfig.max_kl` left nothing of the
                step.

        Returns:
            Largest change of a logprob at the first tokens of an answer to the call's prompt, in
            nats, in the engine where it is least; 0.0 if the weights equal the parent's and the
            gradient was below `LEAST_NORM`.

        Raises:
            ArtError: the answer's logprobs are not finite, the weights are the parent's though
                there was a gradient, or the sampler does not apply them.
        """

        async def check(engine: ChatEngine) -> float:
            asked = before.get(engine) or await self._ask(engine, self.parent)
            return await self._change(engine, asked, grad_norm)

        return min((await self._of_each(check)).values())

    async def _of_each(self, do: Callable[[ChatEngine], Awaitable[T]]) -> dict[ChatEngine, T]:
        if not self.sampler.engines:
            await self.sampler.ready()
        engines = self.sampler.engines
        results = await asyncio.gather(*map(do, engines), return_exceptions=True)
        found: dict[ChatEngine, T] = {}
        for engine, result in zip(engines, results, strict=True):
            if not isinstance(result, BaseException):
                found[engine] = result
            elif not isinstance(result, EngineUnavailable):
                raise result
            else:
                log.warning("An engine was not asked about the new version: %s", result)
        if not found:
            raise EngineUnavailable("No engine of the sampler answers.", retry_after=2)
        return found

    async def _change(self, engine: ChatEngine, before: ChatReply, grad_norm: float) -> float:
        hidden, parent, child = logprob_tolerance(engine.info.dtype), self.parent, self.child
        old, new = before, await self._ask(engine, child, len(before.token_ids))
        _check_finite(new)
        change, _ = _compare(old, new)
        if change > hidden:
            return change
        if await asyncio.to_thread(_same_weights, parent, child):
            if grad_norm > LEAST_NORM:
                raise ArtError(
                    "The learner's step left the adapter as it was: its weights equal the parent's "
                    f"byte for byte, though the gradient's norm was {grad_norm:.3g}. Either the "
                    "learner does not save what it trains, or learning_rate is too small for the "
                    "precision of the weights. Nothing was published."
                )
            return 0.0
        old, new = [await self._ask(engine, version, TOKENS) for version in (parent, child)]
        _check_finite(new)
        change, _ = _compare(old, new)
        if change > hidden:
            return change
        for name, other, reply in (
            (f"its parent {parent.name}", parent, old),
            ("the base model", None, await self._ask(engine, None, TOKENS)),
        ):
            seen, tokens = _compare(reply, new)
            if seen > hidden:
                continue
            moved = await self._moved(other, new, tokens)
            if moved > seen + 2 * hidden:  # each engine may round once
                raise ArtError(
                    f"The sampler does not apply the new adapter: it answers as {name} does (at "
                    f"most {seen:.2g} nats from it on any token), while the learner's logprobs of "
                    f"that answer moved by {moved:.3g} nats on average. See that the sampler loads "
                    "LoRA adapters for this model and is asked for them by name. Nothing was "
                    "published."
                )
        return change

    async def _ask(
        self, engine: ChatEngine, version: NamedAdapter | None, tokens: int = 1
    ) -> ChatReply:
        """The first tokens of a version's answer (None: the base model's) to the call's prompt.

        Asked a second time if the engine dies meanwhile: another call may have been the reason.
        """
        call = self.call
        request = ChatRequest(
            id="probe",
            messages=call.request["messages"],
            tools=call.shown_tools,
            tool_choice="none",  # what is called does not matter, and the format may not be known
            adapter=version.name if version else None,
            sampling=Sampling(max_tokens=tokens, seed=0, top_logprobs=TOP),
            images={name: b64encode_as_string(body) for name, body in call.images.items()},
        )
        try:
            return await _reply(engine, request)
        except EngineUnavailable:
            return await _reply(engine, request)

    async def _moved(self, old: NamedAdapter | None, reply: ChatReply, tokens: int) -> float:
        """Mean change of the learner's logprobs of the first tokens of a reply, in nats."""
        ids = [*reply.prompt_token_ids, *reply.token_ids]
        start, empty = len(reply.prompt_token_ids), [0.0] * len(ids)
        mask = [0] * start + [1] * len(reply.token_ids)
        row = Row(ids, mask, empty, empty, images=dict(self.call.images))
        # The new version first: the learner has it in memory.
        [after] = await self.learner.logprobs(self.child.path, [row])
        [before] = await self.learner.logprobs(old.path if old else None, [row])
        places = range(start, start + tokens)
        return statistics.fmean(abs(after[i] - before[i]) for i in places)


async def _reply(engine: ChatEngine, request: ChatRequest) -> ChatReply:
    async for reply in engine.chat(request):
        if isinstance(reply, ChatReply):
            return reply
    raise ArtError("The sampler ended a call without a reply.")


def _check_finite(reply: ChatReply) -> None:
    if not all(map(math.isfinite, reply.logprobs)):
        raise ArtError(
            f"The new version gives logprobs that are not finite: {list(reply.logprobs)[:4]} …. "
            "Lower learning_rate or max_grad_norm. Nothing was published."
        )


def _compare(old: ChatReply, new: ChatReply) -> tuple[float, int]:
    """Largest difference of two replies' logprobs, and how many tokens have equal contexts."""
    worst, tokens = 0.0, 0
    for i in range(min(len(old.token_ids), len(new.token_ids))):
        before, after = ({t: p for t, p, _ in one.top_logprobs[i]} for one in (old, new))
        gaps = [abs(after[token] - before[token]) for token in before if token in after]
        worst, tokens = max([worst, *gaps] if gaps else [worst, 1.0]), tokens + 1
        if old.token_ids[i] != new.token_ids[i]:
            break
    return worst, tokens


def _same_weights(parent: NamedAdapter, child: NamedAdapter) -> bool:
    one, other = parent.path / WEIGHTS_FILE, child.path / WEIGHTS_FILE
    return one.read_bytes() == other.read_bytes()


#: Learning rates by which an update may move the weights. Above 3.17: the moments of 8-bit Adam are
#: rounded.
MOST_RATES = 3.5
#: Of a float32: half of it is what one update may be off by where it is written down.
_ROUNDING = 2.0**-23
_NOTHING = "Nothing was published."


def check_weights(parent: Path, child: Path, rate: float, updates: float) -> float:
    """Compare the weights of two adapters, one tensor at a time.

    AdamW without weight decay moves a weight by ``rate · m / (√v + ε)`` in an update, m and v being
    means of its gradients and of their squares. Whatever the gradients were, ``|m| / √v`` is at
    most ``√Σ a²/b``, a and b being the weights of one gradient in either mean (Cauchy and Schwarz).
    That grows with the number of updates to ``(1 - β1) / √((1 - β2) · (1 - β1²/β2))``: 2.35 at β =
    (0.9, 0.99), 2.53 at (0.6, 0.96), and at most 3.17 with any `TrainConfig.momentum` (at 0). What
    is further away was made by no step: by a damaged optimizer state, by a fault of memory, or by
    another program.

    Args:
        parent: folder of the version that the step started from.
        child: folder of the new one.
        rate: the step's learning rate.
        updates: how many updates the optimizer has taken.

    Returns:
        The root mean square, over all weights, of what they changed by.

    Raises:
        ArtError: a weight is not finite, the tensors are others than the parent's, or the change is
            above ``3.5 · rate · updates`` (and the rounding of the weights).
    """
    squares, before, count = 0.0, 0.0, 0
    try:
        with _opened(parent) as old, _opened(child) as new:
            names = sorted(new.keys())
            if names != sorted(old.keys()):
                odd = sorted({*names} ^ {*old.keys()})
                raise ArtError(
                    f"The learner saved other tensors than the parent has: {odd[:3]}. {_NOTHING}"
                )
            for name in names:
                was, now = (_flat(one.get_tensor(name)) for one in (old, new))
                if was.shape != now.shape:
                    raise ArtError(
                        f"The learner saved {name!r} with {len(now)} numbers, expected the "
                        f"parent's {len(was)}. {_NOTHING}"
                    )
                moved = now - was
                if not math.isfinite(square := float(moved @ moved)):
                    raise ArtError(
                        f"The new version's {name!r} holds numbers that are not finite; lower "
                        f"learning_rate (now {rate:g}). {_NOTHING}"
                    )
                squares, before, count = (
                    squares + square,
                    before + float(was @ was),
                    count + len(was),
                )
    except (OSError, SafetensorError) as error:
        raise ArtError(f"{WEIGHTS_FILE} cannot be read: {error}. {_NOTHING}") from error
    change = math.sqrt(squares / max(count, 1))
    most = MOST_RATES * rate * updates + _ROUNDING * updates * math.sqrt(before / max(count, 1))
    if change > most:
        raise ArtError(
            f"The new version's weights are {change:.3g} away from its parent's (root mean "
            f"square), expected at most {most:.3g}: AdamW moves them by no more than "
            f"{MOST_RATES:g} learning rates in an update, whatever the gradients (learning_rate "
            f"{rate:g}, {updates:g} updates). Its state on disk, or the machine's memory, may be "
            f"damaged. {_NOTHING}"
        )
    return change


def _opened(folder: Path) -> Any:
    return safe_open(folder / WEIGHTS_FILE, framework="np")


def _flat(values: np.ndarray) -> np.ndarray:
    return values.ravel().astype(np.float64)

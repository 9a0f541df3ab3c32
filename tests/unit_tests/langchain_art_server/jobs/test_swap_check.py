"""Checks of a version by its answers. Engines are values here; whole ones are in test_faults."""

import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from langchain_art.errors import ArtError, EngineUnavailable
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import ChatReply, ChatRequest, ModelInfo
from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE
from langchain_art_server.backends.peft.adapter_io import ADAM_EPS, adam_betas
from langchain_art_server.jobs.swap_check import (
    MOST_RATES,
    TOKENS,
    NamedAdapter,
    SwapCheck,
    check_weights,
)
from langchain_art_server.storage.tables import CallRecord
from tests.support.call_records import record

PARENT, CHILD, BASE = "p@3", "p@3+new", None


def reply(*logprobs: float, last: int = 3) -> ChatReply:
    """A reply of three tokens, each with another one beside it."""
    ids = [1, 2, last]
    return ChatReply(
        prompt_token_ids=[7, 8],
        token_ids=ids,
        logprobs=list(logprobs),
        content="",
        tool_calls=[],
        finish_reason="stop",
        top_logprobs=[[(i, p, "x"), (9, -4.0, "y")] for i, p in zip(ids, logprobs, strict=True)],
    )


class Sampler:
    """Says as many tokens of a version's reply as are asked for; one engine."""

    def __init__(self, dtype: str, **said: ChatReply) -> None:
        self.said: dict[Any, ChatReply] = {
            {"parent": PARENT, "child": CHILD, "base": BASE}[who]: one for who, one in said.items()
        }
        self.info = ModelInfo("m", "m", 1, "cpu", dtype, 64, 16, 8)
        self.asked: list[ChatRequest] = []
        self.engines = (self,)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatReply, None]:
        self.asked.append(request)
        said, most = self.said[request.adapter], request.sampling.max_tokens
        yield replace(
            said,
            token_ids=said.token_ids[:most],
            logprobs=said.logprobs[:most],
            top_logprobs=said.top_logprobs[:most],
        )


class Learner:
    def __init__(self, child: float = 0.0, base: float = 0.0) -> None:
        self.shift = {"new": child, None: base, "3": 0.0}

    async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
        shift = self.shift[adapter.name if adapter else None]
        return [[-1.0 + shift * (i >= 2) for i in range(len(row.token_ids))] for row in rows]


class Replicas:
    """Several of them as one sampler."""

    def __init__(self, *engines: Sampler) -> None:
        self.engines = engines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("3", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS_FILE).write_text(name)
    return tmp_path


def swap(folder: Path, sampler: Any, learner: Any, call: CallRecord | None = None) -> SwapCheck:
    versions = NamedAdapter(PARENT, folder / "3"), NamedAdapter(CHILD, folder / "new")
    return SwapCheck(sampler, learner, call or record("c"), *versions)


async def effect(folder: Path, sampler: Any, learner: Learner, norm: float = 1.0) -> float:
    check = swap(folder, sampler, learner)
    return await check.after(await check.before(), norm)


SAME = reply(-0.1, -0.2, -0.3)
MOVED = reply(-0.3, -0.2, -0.3)
OTHER = reply(-0.7, -0.2, -0.3)


async def test_a_change_anywhere_in_the_answer_is_enough(folder: Path) -> None:
    for child, asked in ((MOVED, [1, 1]), (reply(-0.1, -0.2, -0.5), [1, 1, TOKENS, TOKENS])):
        sampler = Sampler("float32", parent=SAME, child=child)
        assert await effect(folder, sampler, Learner()) == pytest.approx(0.2)
        assert [one.sampling.max_tokens for one in sampler.asked] == asked
        assert {one.sampling.seed for one in sampler.asked} == {0}
    sampler = Sampler("float32", parent=SAME, child=reply(-0.1, math.nan, -0.3))
    with pytest.raises(ArtError, match="logprobs that are not finite"):
        await effect(folder, sampler, Learner())


async def test_a_version_is_asked_what_the_call_was_whatever_it_may_answer(folder: Path) -> None:
    """With its images, the tools that it was shown, and no need of a known format of calls."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
    named = {"type": "function", "function": {"name": "read"}}
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    request = {"messages": [], "tools": tools, "tool_choice": only, "images": ["abc"]}
    shown: list[dict[str, bytes]] = []

    class Seeing(Learner):
        async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
            shown.extend(row.images for row in rows)
            return await super().logprobs(adapter, rows)

    sampler = Sampler("float32", parent=SAME, child=SAME, base=OTHER)
    check = swap(folder, sampler, Seeing(), record("c", request=request, images={"abc": b"pixels"}))
    assert await check.after(await check.before(), 1.0) == 0.0
    for asked in sampler.asked:
        assert (asked.tools, asked.tool_choice) == (tools[:1], "none")
        assert asked.images == {"abc": "cGl4ZWxz"}
    assert shown == [{"abc": b"pixels"}] * 2


async def test_equal_weights_are_a_fault_only_where_there_was_a_gradient(folder: Path) -> None:
    (folder / "new" / WEIGHTS_FILE).write_text("3")
    # What follows another token is not compared.
    parted = replace(SAME, token_ids=[1, 5, 6], top_logprobs=[*SAME.top_logprobs[:2], []])
    for child, norm in ((parted, 0.0), (SAME, 0.0), (SAME, 1e-9)):
        sampler = Sampler("float32", parent=SAME, child=child)
        assert await effect(folder, sampler, Learner(), norm) == 0.0
    with pytest.raises(ArtError, match=r"left the adapter as it was.*norm was 0\.5"):
        await effect(folder, sampler, Learner(), 0.5)


NEAR = reply(-0.1, -0.22, -0.3)
PARENTS = r"answers as its parent p@3 does \(at most 0"


@pytest.mark.parametrize(
    ("dtype", "child", "base", "moved", "fault"),
    [
        ("float32", SAME, OTHER, (1.9e-4, 0.0), ""),
        ("float32", SAME, OTHER, (5e-4, 0.0), PARENTS),
        ("bfloat16", SAME, OTHER, (0.09, 0.0), ""),
        ("bfloat16", SAME, OTHER, (0.11, 0.0), PARENTS),
        # Other calls in the batch make a sampler that ignores adapters answer a little differently.
        ("bfloat16", NEAR, SAME, (0.1, 0.0), ""),
        ("bfloat16", NEAR, SAME, (0.13, 0.0), r"at most 0\.02 nats from it"),
        # Small steps are each lost in rounding, but lead to a version far from the base model.
        ("bfloat16", SAME, SAME, (0.01, -0.2), "answers as the base model does"),
    ],
)
async def test_a_sampler_that_stands_still_is_held_against_the_learner(
    folder: Path,
    dtype: str,
    child: ChatReply,
    base: ChatReply,
    moved: tuple[float, float],
    fault: str,
) -> None:
    sampler = Sampler(dtype, parent=SAME, child=child, base=base)
    if fault:
        with pytest.raises(ArtError, match=fault):
            await effect(folder, sampler, Learner(*moved))
    else:
        expected = pytest.approx(0.02 if child is NEAR else 0.0)
        assert await effect(folder, sampler, Learner(*moved)) == expected


async def test_each_replica_must_serve_the_new_version(folder: Path) -> None:
    right = Sampler("float32", parent=SAME, child=MOVED)
    more = Sampler("float32", parent=SAME, child=reply(-0.4, -0.2, -0.3))
    check = swap(folder, Replicas(more), Learner(child=0.5))
    before: Any = await check.before()
    late: Any = Replicas(more, right)  # one that was not there before the step
    assert await replace(check, sampler=late).after(before, 1.0) == pytest.approx(0.2)
    ignoring = Sampler("float32", parent=SAME, child=SAME, base=OTHER)
    with pytest.raises(ArtError, match="answers as its parent p@3 does"):
        await effect(folder, Replicas(right, ignoring), Learner(child=0.5))


async def test_a_replica_that_dies_meanwhile_is_left_out_unless_it_is_the_last(
    folder: Path,
) -> None:
    class Dying(Sampler):
        async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatReply, None]:
            if request.adapter == CHILD:
                raise EngineUnavailable("it died")
            async for one in super().chat(request):
                yield one

    dying, right = Dying("float32", parent=SAME), Sampler("float32", parent=SAME, child=MOVED)
    assert await effect(folder, Replicas(dying, right), Learner()) == pytest.approx(0.2)
    with pytest.raises(EngineUnavailable, match="No engine"):
        await effect(folder, Replicas(dying), Learner())


A, B = "layer.lora_A.weight", "layer.lora_B.weight"


def most_of_adam(betas: tuple[float, float]) -> float:
    return (1 - betas[0]) / math.sqrt((1 - betas[1]) * (1 - betas[0] ** 2 / betas[1]))


def naive_adam(gradients: list[float], momentum: float) -> list[float]:
    """AdamW's change of one weight in each update, as its paper writes it."""
    (one, two), m, v, moves = adam_betas(momentum), 0.0, 0.0, list[float]()
    for t, gradient in enumerate(gradients, 1):
        m, v = one * m + (1 - one) * gradient, two * v + (1 - two) * gradient**2
        moves.append((m / (1 - one**t)) / (math.sqrt(v / (1 - two**t)) + ADAM_EPS))
    return moves


MOMENTS = st.floats(0, 0.999)


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=40), MOMENTS)
def test_no_gradients_move_a_weight_further(gradients: list[float], momentum: float) -> None:
    most = most_of_adam(adam_betas(momentum)) * (1 + 1e-9)  # of rounding
    assert max(map(abs, naive_adam(gradients, momentum))) <= most


@given(MOMENTS)
def test_no_momentum_allows_more_than_is_said(momentum: float) -> None:
    assert 2.2 < most_of_adam(adam_betas(momentum)) < 3.17 < MOST_RATES


@pytest.mark.parametrize(("momentum", "said"), [(0.9, 2.35), (0.6, 2.53)])
def test_the_bound_of_the_gradients_that_move_it_furthest_is_near(
    momentum: float, said: float
) -> None:
    one, two = adam_betas(momentum)
    # Equality in Cauchy's and Schwarz's.
    worst = [(one / two) ** -t for t in range(round(10 / (1 - two)))]
    assert naive_adam(worst, momentum)[-1] == pytest.approx(most_of_adam((one, two)), rel=1e-3)
    assert most_of_adam((one, two)) == pytest.approx(said, abs=5e-3)


class Pair:
    def __init__(self, folder: Path) -> None:
        self.parent, self.child = folder / "1", folder / "2"
        self.weights = {A: np.full((2, 8), 0.05, np.float32), B: np.zeros((8, 2), np.float32)}
        for each in (self.parent, self.child):
            each.mkdir()
            save_file(self.weights, each / WEIGHTS_FILE)

    def save(self, change: Callable[[dict[str, np.ndarray]], object]) -> None:
        changed = {name: value.copy() for name, value in self.weights.items()}
        change(changed)
        save_file(changed, self.child / WEIGHTS_FILE)

    def check(self, rate: float = 1e-3, updates: int = 1) -> float:
        return check_weights(self.parent, self.child, rate, updates)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_the_change_is_the_root_mean_square(pair: Pair) -> None:
    assert pair.check(updates=0) == 0.0
    pair.save(lambda found: found[B].__setitem__(slice(None), 2e-3))
    assert pair.check() == pytest.approx(2e-3 / math.sqrt(2), rel=1e-6)
    pair.save(lambda found: found[A].__iadd__(np.float32(4e-9)))  # less than its last digit
    assert pair.check(rate=1e-12) == pytest.approx(4e-9 / math.sqrt(2), rel=0.1)


@pytest.mark.parametrize("updates", [1, 4])
def test_further_than_a_step_can_go_is_refused(pair: Pair, updates: int) -> None:
    inside, outside = (share * 3.5e-3 * updates for share in (0.99, 1.01))
    for name in (A, B):
        pair.weights[name][:] = 0
    save_file(pair.weights, pair.parent / WEIGHTS_FILE)
    pair.save(lambda found: [one.__iadd__(np.float32(inside)) for one in found.values()])
    pair.check(updates=updates)
    pair.save(lambda found: [one.__iadd__(np.float32(outside)) for one in found.values()])
    with pytest.raises(ArtError, match=r"no more than 3\.5 learning rates.*Nothing was published"):
        pair.check(updates=updates)


def test_other_tensors_and_shapes_are_refused(pair: Pair) -> None:
    pair.save(lambda found: found.__setitem__("other", found.pop(B)))
    with pytest.raises(ArtError, match="other tensors than the parent has"):
        pair.check()
    pair.save(lambda found: found.__setitem__(B, np.zeros((8, 3), np.float32)))
    with pytest.raises(ArtError, match="with 24 numbers, expected the parent's 16"):
        pair.check()
    (pair.child / WEIGHTS_FILE).write_bytes(b"\xff" * 64)
    with pytest.raises(ArtError, match="cannot be read"):
        pair.check()

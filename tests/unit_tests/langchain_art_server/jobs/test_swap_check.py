"""What a version's answers say of it. Engines are values here; whole ones are in test_faults."""

import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import ArtError, EngineUnavailable
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import ChatReply, ChatRequest, ModelInfo
from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE
from langchain_art_server.jobs.swap_check import TOKENS, NamedAdapter, SwapCheck
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
    """Says of each reply as many tokens as are asked for, and keeps the requests; one engine."""

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


async def effect(
    folder: Path,
    sampler: Sampler,
    learner: Learner,
    *,
    same: bool = False,
    norm: float = 1.0,
    call: CallRecord | None = None,
) -> float:
    check = swap(folder, sampler, learner, same=same, call=call)
    return await check.after(await check.before(), norm)


def swap(
    folder: Path, sampler: Any, learner: Any, *, same: bool = False, call: CallRecord | None = None
) -> SwapCheck:
    versions: list[NamedAdapter] = []
    for name, folder_name in ((PARENT, "3"), (CHILD, "new")):
        path = folder / folder_name
        path.mkdir()
        (path / WEIGHTS_FILE).write_text("same" if same else folder_name)
        versions.append(NamedAdapter(name, path))
    return SwapCheck(sampler, learner, call or record("c"), *versions)


SAME = reply(-0.1, -0.2, -0.3)


async def test_one_token_is_enough_if_it_has_changed(tmp_path: Path) -> None:
    sampler = Sampler("float32", parent=SAME, child=reply(-0.3, -0.2, -0.3))
    assert await effect(tmp_path, sampler, Learner()) == pytest.approx(0.2)
    assert [one.sampling.max_tokens for one in sampler.asked] == [1, 1]


async def test_a_change_anywhere_in_the_answer_is_enough(tmp_path: Path) -> None:
    sampler = Sampler("float32", parent=SAME, child=reply(-0.1, -0.2, -0.5))
    assert await effect(tmp_path, sampler, Learner()) == pytest.approx(0.2)
    assert [one.sampling.max_tokens for one in sampler.asked] == [1, 1, TOKENS, TOKENS]
    assert {one.sampling.seed for one in sampler.asked} == {0}


async def test_a_version_is_asked_what_the_call_was_whatever_it_may_answer(tmp_path: Path) -> None:
    """With its images, the tools that it was shown, and no need of a known format of calls."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
    named = {"type": "function", "function": {"name": "read"}}
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    request = {"messages": [], "tools": tools, "tool_choice": only, "images": ["abc"]}
    call = record("c", request=request, images={"abc": b"pixels"})
    sampler = Sampler("float32", parent=SAME)
    await swap(tmp_path, sampler, Learner(), call=call).before()
    [asked] = sampler.asked
    assert (asked.tools, asked.tool_choice) == (tools[:1], "none")
    assert asked.images == {"abc": "cGl4ZWxz"}


async def test_the_learner_is_shown_the_images_of_an_answer_that_stands_still(
    tmp_path: Path,
) -> None:
    shown: list[dict[str, bytes]] = []

    class Seeing(Learner):
        async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
            shown.extend(row.images for row in rows)
            return await super().logprobs(adapter, rows)

    sampler = Sampler("float32", parent=SAME, child=SAME, base=reply(-0.7, -0.2, -0.3))
    call = record("c", images={"abc": b"pixels"})
    assert await effect(tmp_path, sampler, Seeing(), call=call) == 0.0
    assert shown == [{"abc": b"pixels"}] * 2


async def test_what_follows_another_token_is_not_compared(tmp_path: Path) -> None:
    parted = replace(SAME, token_ids=[1, 5, 6], top_logprobs=[*SAME.top_logprobs[:2], []])
    sampler = Sampler("float32", parent=SAME, child=parted)
    assert await effect(tmp_path, sampler, Learner(), same=True, norm=0.0) == 0.0


async def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    sampler = Sampler("float32", parent=SAME, child=reply(-0.1, math.nan, -0.3))
    with pytest.raises(ArtError, match="logprobs that are not finite"):
        await effect(tmp_path, sampler, Learner())


async def test_equal_weights_are_a_fault_only_where_there_was_a_gradient(tmp_path: Path) -> None:
    sampler = Sampler("float32", parent=SAME, child=SAME)
    for folder, norm in ((tmp_path / "one", 0.0), (tmp_path / "two", 1e-9)):
        folder.mkdir()
        assert await effect(folder, sampler, Learner(), same=True, norm=norm) == 0.0
    with pytest.raises(ArtError, match=r"left the adapter as it was.*norm was 0\.5"):
        await effect(tmp_path, sampler, Learner(), same=True, norm=0.5)


@pytest.mark.parametrize(
    ("dtype", "moved", "fault"),
    [
        ("float32", 5e-5, False),
        ("float32", 5e-4, True),
        ("float32", 1.9e-4, False),
        ("bfloat16", 0.09, False),
        ("bfloat16", 0.11, True),
    ],
)
async def test_a_sampler_that_stands_still_is_held_against_the_learner(
    tmp_path: Path, dtype: str, moved: float, fault: bool
) -> None:
    sampler = Sampler(dtype, parent=SAME, child=SAME, base=reply(-0.7, -0.2, -0.3))
    if not fault:
        assert await effect(tmp_path, sampler, Learner(child=moved)) == 0.0
        return
    with pytest.raises(ArtError, match=r"answers as its parent p@3 does \(at most 0 nats"):
        await effect(tmp_path, sampler, Learner(child=moved))


async def test_rounding_is_no_change(tmp_path: Path) -> None:
    """Other calls in the batch make a sampler that ignores adapters answer a little differently."""
    sampler = Sampler("bfloat16", parent=SAME, child=reply(-0.1, -0.22, -0.3), base=SAME)
    (tmp_path / "small").mkdir()
    found = await effect(tmp_path / "small", sampler, Learner(child=0.1))
    assert found == pytest.approx(0.02)
    with pytest.raises(ArtError, match=r"at most 0\.02 nats from it"):
        await effect(tmp_path, sampler, Learner(child=0.13))


async def test_small_steps_add_up_against_the_base_model(tmp_path: Path) -> None:
    """Each is lost in rounding; but the version that they led to is far from the base model."""
    sampler = Sampler("bfloat16", parent=SAME, child=SAME, base=SAME)
    with pytest.raises(ArtError, match="answers as the base model does"):
        await effect(tmp_path, sampler, Learner(child=0.01, base=-0.2))


class Replicas:
    """Several of them as one sampler."""

    def __init__(self, *engines: Sampler) -> None:
        self.engines = engines


async def effects(folder: Path, *engines: Sampler, late: Sampler | None = None) -> float:
    """The check by several engines; `late` was not there before the step."""
    check = swap(folder, Replicas(*engines), Learner(child=0.5))
    before: Any = await check.before()
    assert set(before) == set(engines)
    now: Any = Replicas(*engines, late) if late else Replicas(*engines)
    return await replace(check, sampler=now).after(before, 1.0)


async def test_each_replica_must_serve_the_new_version(tmp_path: Path) -> None:
    right = Sampler("float32", parent=SAME, child=reply(-0.3, -0.2, -0.3))
    more = Sampler("float32", parent=SAME, child=reply(-0.4, -0.2, -0.3))
    (tmp_path / "right").mkdir()
    assert await effects(tmp_path / "right", more, late=right) == pytest.approx(0.2)
    ignoring = Sampler("float32", parent=SAME, child=SAME, base=reply(-0.7, -0.2, -0.3))
    with pytest.raises(ArtError, match="answers as its parent p@3 does"):
        await effects(tmp_path, right, ignoring)


async def test_a_replica_that_dies_meanwhile_is_left_out_unless_it_is_the_last(
    tmp_path: Path,
) -> None:
    class Dying(Sampler):
        async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatReply, None]:
            if request.adapter == CHILD:
                raise EngineUnavailable("it died")
            async for one in super().chat(request):
                yield one

    right = Sampler("float32", parent=SAME, child=reply(-0.3, -0.2, -0.3))
    (tmp_path / "one").mkdir()
    found = await effects(tmp_path / "one", Dying("float32", parent=SAME), right)
    assert found == pytest.approx(0.2)
    with pytest.raises(EngineUnavailable, match="No engine"):
        await effects(tmp_path, Dying("float32", parent=SAME))

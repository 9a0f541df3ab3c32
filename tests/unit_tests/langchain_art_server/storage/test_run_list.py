"""Lists of runs equal a naive filter and sort of the same runs, page by page."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from langchain_art.errors import InvalidRequest
from langchain_art.statistics.intervals import mean_of_scenarios
from langchain_art.wire import Review, Reward, TrainRequest, Trajectory, Turn, Usage
from langchain_art_server.storage import run_list
from langchain_art_server.storage.run_index import words_of
from langchain_art_server.storage.run_list import EvaluatedRun, RunsQuery, Sort
from langchain_art_server.storage.store import Store
from tests.support.soak import share

WORDS = ("refund", "Übung", "invoice", "日本語", "re-fund", "'; DROP", '"quoted', "a*b")


def made(seed: int) -> Trajectory:
    draw = random.Random(seed)
    turns = tuple(
        Turn(
            node=draw.choice(["writer", "critic"]),
            model=draw.choice(["tiny@1", "tiny@2", "other@1", "gpt"]),
            ours=draw.random() < 0.8,
            messages=({"role": "user", "content": " ".join(draw.choices(WORDS, k=3))},),
            reply={"role": "assistant", "content": draw.choice(WORDS)},
            usage=Usage(prompt_tokens=5, completion_tokens=draw.randrange(4)),
            started_at=1e9 + k,
            latency=draw.choice([0.5, 2.0]),
        )
        for k in range(draw.randrange(4))
    )
    return Trajectory(
        id=f"run-{seed}",
        scenario=draw.choice(["s", "t", None]),
        turns=turns,
        reward=draw.choice([None, 0.0, 0.5, 1.0]),
        scores={name: draw.choice([0.0, 0.3]) for name in draw.sample(["ruler", "h"], 1)},
        status=draw.choice(["completed", "failed"]),
        error=draw.choice([None, "Boom\0 ü"]),
    )


RUNS = [made(seed) for seed in range(60)]


def _named(run: Trajectory) -> set[str]:
    return {t.model for t in run.turns if t.model and t.ours}


def _by(run: Trajectory, policy: str) -> bool:
    return any(model.startswith(f"{policy}@") for model in _named(run))


#: A run of both policies, from which the other one's version 4 has learned.
OTHERS = next(run.id for run in RUNS[10:] if _by(run, "tiny") and _by(run, "other"))


def _says(run: Trajectory, asked: str) -> bool:
    begins = asked.removesuffix("*")
    texts = [run.scenario or "", run.error or ""]
    texts += [m["content"] for t in run.turns for m in (*t.messages, t.reply or {"content": ""})]
    return any(
        any(w == asked or (begins != asked and w.startswith(begins)) for w in words_of(text))
        for text in texts
    )


CASES: list[tuple[dict[str, Any], Callable[[Trajectory], bool]]] = [
    ({}, lambda run: True),
    ({"policy": "tiny"}, lambda run: any(m.startswith("tiny@") for m in _named(run))),
    ({"version": "tiny@2"}, lambda run: "tiny@2" in _named(run)),
    ({"scenario": "s"}, lambda run: run.scenario == "s"),
    ({"node": "critic"}, lambda run: any(t.node == "critic" for t in run.turns)),
    ({"status": "failed"}, lambda run: run.status == "failed"),
    ({"reward_min": 0.5}, lambda run: (run.total_return or 0) >= 0.5),
    ({"reward_max": 0.0}, lambda run: run.total_return is not None and run.total_return <= 0),
    ({"score": "ruler"}, lambda run: "ruler" in run.scores),
    ({"score": "h", "score_min": 0.3}, lambda run: run.scores.get("h", 0) >= 0.3),
    ({"text": "REFUND"}, lambda run: _says(run, "refund")),
    ({"text": "über"}, lambda run: False),
    ({"text": "üb"}, lambda run: False),
    ({"text": "Üb*"}, lambda run: _says(run, "üb*")),
    ({"text": "übung"}, lambda run: _says(run, "übung")),
    ({"text": "日本*"}, lambda run: _says(run, "日本*")),
    ({"text": "drop quoted"}, lambda run: _says(run, "drop") and _says(run, "quoted")),
    ({"text": "'\"*()"}, lambda run: False),
    (
        {"policy": "tiny", "node": "writer", "text": "inv*", "reward_min": 0.0},
        lambda run: (
            any(m.startswith("tiny@") for m in _named(run))
            and any(t.node == "writer" for t in run.turns)
            and _says(run, "inv*")
            and run.total_return is not None
        ),
    ),
    ({"reviewed": True}, lambda run: run.id == "run-7"),
    ({"reviewed": False, "step": 4}, lambda run: run.id in ("run-8", OTHERS)),
    ({"policy": "tiny", "step": 4}, lambda run: run.id in ("run-7", "run-8") and _by(run, "tiny")),
    ({"policy": "other", "step": 4}, lambda run: run.id == OTHERS),
]
KEYS: dict[Sort, Callable[[Trajectory], float | None]] = {
    "number": lambda run: RUNS.index(run),
    "reward": lambda run: run.total_return,
    "calls": lambda run: len(run.turns),
    "tokens": lambda run: sum(t.usage.completion_tokens for t in run.turns if t.usage),
    "seconds": lambda run: (
        max(t.started_at + t.latency for t in run.turns)  # type: ignore[operator, type-var]
        - min(t.started_at for t in run.turns)  # type: ignore[type-var]
        if run.turns
        else None
    ),
}


def expected(
    keep: Callable[[Trajectory], bool], key: Callable[[Trajectory], float | None], down: bool
) -> list[str]:
    chosen = [run for run in RUNS if keep(run)]
    valued = [run for run in chosen if key(run) is not None]
    rest = [run for run in chosen if key(run) is None]
    order = sorted(valued, key=lambda run: (key(run), RUNS.index(run)), reverse=down)
    return [run.id for run in [*order, *sorted(rest, key=RUNS.index, reverse=True)]]


async def listed(store: Store, asked: dict[str, Any], sort: Sort, down: bool) -> list[str]:
    found: list[str] = []
    after: str | None = None
    while True:
        page = await store.runs.page(
            RunsQuery(**asked, sort=sort, descending=down, limit=17, after=after)
        )
        assert len(page.runs) <= 17
        found += [run.id for run in page.runs]
        if page.next is None:
            return found
        after = page.next


async def fill(store: Store) -> None:
    for start in range(0, len(RUNS), 4):
        await store.add_trajectories(RUNS[start : start + 4], group_id=f"g-{start // 4}")
    said = Review(id="a", source="page", trajectory="run-7", kind="score", name="h", value=1, at=1)
    await store.reviews.put([said])
    for job, run, target, policy in (
        ("job-1", "run-7", 4, "tiny"),
        ("job-2", "run-8", 4, "tiny"),
        ("job-3", "run-9", 5, "tiny"),
        ("job-4", OTHERS, 4, "other"),
    ):
        await store.jobs.add(job, job, TrainRequest(policy=policy, groups=((run,),)), [], 9)
        await store.jobs.begin(job, target - 1, target)
        await store.jobs.finish(job, None, None, trained=[run])


@pytest.mark.soak
async def test_pages_equal_a_naive_filter_and_sort(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "_COMMON", 20)  # some of the names are, some are not
    await fill(store)
    combined = list(itertools.product(CASES, KEYS.items(), (True, False)))
    # Every seventh: each filter is with one order at least, and each order with some filters.
    for (asked, keep), (sort, key), down in combined[:: 1 if share() else 7]:
        assert await listed(store, asked, sort, down) == expected(keep, key, down), asked
    by_score = expected(lambda run: "h" in run.scores, lambda run: run.scores["h"], True)
    assert await listed(store, {"score": "h"}, "score", True) == by_score
    assert sum(map(bool, (expected(keep, KEYS["number"], True) for _, keep in CASES))) >= 16


async def test_what_is_listed_is_what_the_run_says_now(store: Store) -> None:
    await fill(store)
    run = next(run for run in RUNS if run.turns and run.reward is None and run.id > "run-2")
    await store.set_reward(run.id, Reward(reward=0.25, scores={"late": 0.5}, scenario="moved"))
    [found] = (await store.runs.page(RunsQuery(scenario="moved", score="late"))).runs
    assert (found.id, found.reward, found.scores) == (run.id, 0.25, run.scores | {"late": 0.5})
    assert found.asked == run.turns[0].messages[0]["content"]
    [seven] = (await store.runs.page(RunsQuery(reviewed=True))).runs
    assert (seven.reviews, seven.trained_by) == (1, {"tiny": "job-1"})
    assert sorted((await store.runs.names()).scores) == ["h", "late", "ruler"]
    await store.delete_trajectory(run.id)
    assert not (await store.runs.page(RunsQuery(score="late"))).runs
    names = await store.runs.names()
    assert (names.runs, sorted(names.scores)) == (59, ["h", "ruler"])
    with store.engine.connect() as connection:
        words = connection.exec_driver_sql("SELECT count(*) FROM run_words").scalar_one()
    assert words == 59


async def test_what_is_no_cursor_and_no_sort_is_refused(store: Store) -> None:
    for after in ("", "x", "[1]", "[null, -1]", '["a", 1]', "[null, 1e99]"):
        with pytest.raises(InvalidRequest, match="next"):
            await store.runs.page(RunsQuery(after=after))
    with pytest.raises(InvalidRequest, match="name of a score"):
        await store.runs.page(RunsQuery(sort="score"))
    with pytest.raises(ValueError, match="expected its name"):
        RunsQuery(score_min=1.0)


def evaluated(
    name: str, scenario: str | None, reward: float | None, versions: str | None
) -> Trajectory:
    marked = {} if versions is None else {"evaluation": versions}
    return Trajectory(id=name, scenario=scenario, reward=reward, metadata=marked)


EVALUATED = [
    evaluated("a", "s", 0.0, "p@0"),
    evaluated("b", "s", 1.0, "p@0"),
    evaluated("c", "t", 0.25, "p@0"),
    evaluated("d", None, None, "p@0"),
    evaluated("e", "s", 1.0, "p@1 + q@1"),
    evaluated("f", "s", 1.0, None),  # of training
]


async def test_evaluations_are_those_of_the_runs_now(store: Store) -> None:
    assert await store.runs.evaluations() == []
    await store.add_trajectories(EVALUATED)
    first, second = await store.runs.evaluations()
    expected = mean_of_scenarios([[0.0, 1.0], [0.25]])
    assert (first.versions, first.mean, first.ci95) == ("p@0", expected.mean, expected.ci95)
    assert (first.runs, first.scenarios) == (3, 2)
    assert (second.versions, second.mean, second.ci95) == ("p@1 + q@1", 1.0, None)
    assert await store.runs.evaluated("p@0") == [
        EvaluatedRun("a", "s", 0.0, False),
        EvaluatedRun("b", "s", 1.0, False),
        EvaluatedRun("c", "t", 0.25, False),
        EvaluatedRun("d", "run d", None, False),
    ]
    assert await store.runs.evaluated("p@") == []
    await store.set_reward("c", Reward(reward=0.75))  # no run came, none went
    assert (await store.runs.evaluations())[0].mean == pytest.approx(1.75 / 3)
    await store.delete_trajectory("e")
    assert [one.versions for one in await store.runs.evaluations()] == ["p@0"]
    # A run that an evaluation has scored afterwards: of a graph on another server.
    await store.set_reward("f", Reward(reward=1.0, metadata={"evaluation": "p@2"}))
    assert [one.versions for one in await store.runs.evaluations()] == ["p@0", "p@2"]

    await store.delete_trajectory("f")
    # Rewards that change places change the interval alone.
    places = [evaluated(name, name[0], float(name == "s1"), "q") for name in ("s1", "s2", "t1")]
    await store.add_trajectories(places)
    before = (await store.runs.evaluations())[1].ci95
    await store.set_reward("s1", Reward(reward=0.0))
    await store.set_reward("t1", Reward(reward=1.0))
    [_, now] = await store.runs.evaluations()
    assert now.ci95 == mean_of_scenarios([[0.0, 0.0], [1.0]]).ci95 != before

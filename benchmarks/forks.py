"""What branching runs at a decision is worth at equal sampled tokens, against plain groups.

A graph shows the small tic-tac-toe model four positions, one a node: one is decisive (one move wins
or has to be blocked, and counts as half of the reward), the other three are luck: each move counts
a sixth or nothing, by a hash that cannot be learned. In the task ``middle`` the decisive node is
the third, and it is branched; in ``start`` it is the first, and a later one is branched: the case
for which forks are not. Both ways learn with the same settings and sample as many tokens a step: 8
runs of 4 calls a scenario, or 4 runs with 2 continuations of 2 calls each. The figure is the share
of held-out decisive positions that are played right, which is no part of luck.

Intervals are over five seeds, by Student's t; differences are in pairs of one seed. Neither the
learning rate nor the number of continuations was searched for.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import random
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from rich.console import Console
from typing_extensions import TypedDict

from benchmarks.learning.seeds import ci95_of_five
from examples.tic_tac_toe.agent import SYSTEM_PROMPT, read_square
from examples.tic_tac_toe.environment import best_moves, describe, free, random_board
from langchain_art import (
    ChatART,
    Forks,
    LocalServer,
    StepRecord,
    TrainConfig,
    Trainer,
    TrajectoryGroup,
)
from langchain_art.wire import Trajectory

BASE_MODEL = Path("examples/tic_tac_toe/base_model")
SEEDS, GROUPS, HELD_OUT, LEARNING_RATE = 5, 4, 100, 5e-3
AT_ONCE = 10
#: Sampled tokens after which a policy is evaluated; its last step may go a little beyond.
TOKENS = 1_500
QUESTIONS = 60 * GROUPS
LUCK = ("first", "second", "last")
#: task -> its nodes in order, and the one that is branched.
TASKS = {
    "middle": (("first", "second", "choose", "last"), "choose"),
    "start": (("choose", "first", "second", "last"), "second"),
}
WAYS = ("plain", "forks")
console = Console()


class Enough(Exception):
    """A fit has sampled as many tokens as it may."""


class State(TypedDict, total=False):
    """The positions of a scenario, and the square that each node named (-1: none)."""

    boards: dict[str, str]
    first: int
    second: int
    choose: int
    last: int


def build_graph(model: BaseChatModel, order: tuple[str, ...]) -> Any:
    """Four nodes in a row, each with a position of its own; on a checkpointer in memory."""

    def node(name: str) -> Any:
        async def play(state: State) -> dict[str, int]:
            shown = describe(state.get("boards", {})[name])
            reply = await model.ainvoke([("system", SYSTEM_PROMPT), ("user", shown)])
            square = read_square(reply.text)
            return {name: -1 if square is None else square}

        return play

    graph = StateGraph(State)
    for before, name in zip((START, *order), order, strict=False):
        graph.add_node(name, node(name))
        graph.add_edge(before, name)
    graph.add_edge(order[-1], END)
    return graph.compile(checkpointer=InMemorySaver())


def decisive(rng: random.Random) -> str:
    """A position in which one move alone keeps the value, and all others lose it."""
    while True:
        board = random_board(rng, rng.choice((3, 4, 5)))
        if len(best_moves(board)) == 1 and len(free(board)) > 1:
            return board


def scenarios(count: int, seed: int, split: str) -> list[dict[str, Any]]:
    rng = random.Random(f"{split}-{seed}")
    return [
        {
            "id": f"{split}-{seed}-{number}",
            "boards": {
                "choose": decisive(rng),
                **{name: random_board(rng, rng.choice((0, 1, 2))) for name in LUCK},
            },
        }
        for number in range(count)
    ]


def reward(scenario: dict[str, Any], run: Trajectory) -> float:
    """Whether the decisive move is right; in training it is half, and luck the other half."""
    boards, played = scenario["boards"], run.output
    right = float(played["choose"] in best_moves(boards["choose"]))
    if scenario["id"].startswith("test"):
        return right
    texts = [f"{scenario['id']}:{name}:{played[name]}" for name in LUCK]
    lucky = [hashlib.sha256(text.encode()).digest()[0] % 2 for text in texts]
    return 0.5 * right + 0.5 * statistics.fmean(lucky)


def judge(group: TrajectoryGroup) -> list[float]:
    return [reward(group.metadata["scenario"], run) for run in group.trajectories]


def trainer_of(model: ChatART, folder: Path, task: str, way: str, seed: int) -> Trainer:
    order, at = TASKS[task]
    forks = Forks(at=(at,), continuations=2, run_again=order[order.index(at) + 1 :])
    return Trainer(
        model,
        evaluator=judge,
        group_size=8 if way == "plain" else 4,
        groups_per_step=GROUPS,
        concurrency=16,
        forks=None if way == "plain" else forks,
        config=TrainConfig(learning_rate=LEARNING_RATE),
        on_collapse="warn",
        out_dir=folder,
        seed=seed,
        console=Console(file=io.StringIO()),
    )


async def learn(base_url: str, folder: Path, task: str, way: str, seed: int) -> dict[str, float]:
    """Held-out share of right moves after `TOKENS`, steps, tokens, and what was judged."""
    policy = f"{task}-{way}-{seed}"
    model = ChatART(model=policy, base_url=base_url, max_tokens=4)
    graph, train = build_graph(model, TASKS[task][0]), scenarios(QUESTIONS, seed, "train")
    trainer = trainer_of(model, folder, task, way, seed)
    history: list[StepRecord] = []

    def count(record: StepRecord) -> None:
        history.append(record)
        if sum(one.tokens["completion"] for one in history) >= TOKENS:
            raise Enough

    with suppress(Enough):
        await trainer.fit(graph, train, steps=QUESTIONS // GROUPS, on_step=count)
    tokens = sum(one.tokens["completion"] for one in history)
    evaluated = await trainer.evaluate(
        build_graph(model, ("choose",)), scenarios(HELD_OUT, seed, "test")
    )
    assert evaluated.mean is not None
    found = {"right": evaluated.mean, "steps": len(history), "tokens": tokens}
    rewards = " ".join(f"{one.reward_mean:.2f}" for one in history)
    console.print(f"{policy}: {found}; {rewards}")
    return found


async def every_fit(base_url: str, root: Path) -> dict[tuple[str, str], list[dict[str, float]]]:
    """By task and way, a fit of each seed; some run beside each other and share batches."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def fit(task: str, way: str, seed: int) -> dict[str, float]:
        async with slots:
            return await learn(base_url, root / f"{task}-{way}-{seed}", task, way, seed)

    kinds = [(task, way, seed) for task in TASKS for seed in range(SEEDS) for way in WAYS]
    found = await asyncio.gather(*(fit(*kind) for kind in kinds))
    every: dict[tuple[str, str], list[dict[str, float]]] = {}
    for (task, way, _), one in zip(kinds, found, strict=True):
        every.setdefault((task, way), []).append(one)
    return every


async def before(base_url: str, folder: Path) -> float:
    """The base model's share."""
    model = ChatART(model="untrained", base_url=base_url, max_tokens=4)
    trainer = trainer_of(model, folder, "middle", "plain", 0)
    graph = build_graph(model, ("choose",))
    evaluated = await trainer.evaluate(graph, scenarios(HELD_OUT, 0, "test"))
    assert evaluated.mean is not None
    return evaluated.mean


def run() -> tuple[dict[str, float], dict[str, object]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        root = Path(temporary)
        names = ["untrained"]
        with LocalServer(BASE_MODEL, policies=names, data_dir=root / "server") as server:
            figures = {"right_base": asyncio.run(before(server.base_url, root / "base"))}
            every = asyncio.run(every_fit(server.base_url, root))
    for (task, way), found in every.items():
        for name in ("right", "steps", "tokens"):
            figures[f"{name}_{task}_{way}"] = statistics.fmean(one[name] for one in found)
        figures[f"right_{task}_{way}_ci95"] = ci95_of_five([one["right"] for one in found])
    for task in TASKS:
        both = zip(every[task, "forks"], every[task, "plain"], strict=True)
        more = [a["right"] - b["right"] for a, b in both]
        figures[f"forks_over_plain_{task}"] = statistics.fmean(more)
        figures[f"forks_over_plain_{task}_ci95"] = ci95_of_five(more)
    fits = {f"{task}-{way}": found for (task, way), found in every.items()}
    return figures, {"fits": fits, "tokens": TOKENS, "learning_rate": LEARNING_RATE}

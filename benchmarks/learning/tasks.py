"""Three tasks on which fits are compared: the demo, a bandit, and a game.

All are small enough for many fits on a CPU, and fail in different ways: the demo's agent calls
tools in a format that an update can break, the bandit has nothing to break and much to gain, and
in the game, Codenames, one policy plays both roles, and most first games are worth nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.codenames import train as codenames
from examples.codenames.environment import boards
from examples.email_search import train as email_search
from examples.email_search.inbox import MailStore, build
from langchain_art import ChatART, Run, capture
from tests.support.tiny_models import save_model

Rollout = Callable[[Any], Awaitable[Run]]


@dataclass(frozen=True)
class Material:
    """What a fit runs, and on which scenarios."""

    rollout: Rollout
    scenarios: Sequence[Any]


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        name: Of the task.
        target: Mean training reward that counts as learned.
        window: Rollouts of the mean that is compared with the target; the more, the more the reward
            differs from scenario to scenario.
        parameters: Of the base model, of which the learning rate is made.
        most: Rollouts that a fit may make.
        least: Rollouts that a fit whose stability is measured makes.
        max_tokens: Of a reply.
        base_model: Writes the base model below a folder if need be; where it is.
        prepare: Of the chat model, a folder, a seed and a number of scenarios, the `Material`;
            valid in its context.
    """

    name: str
    target: float
    window: int
    parameters: int
    most: int
    least: int
    max_tokens: int
    base_model: Callable[[Path], Path]
    prepare: Callable[[ChatART, Path, int, int], AbstractContextManager[Material]]


@contextmanager
def _demo(model: ChatART, folder: Path, seed: int, count: int):
    path = build(folder / "mails.sqlite3", n_train=count, n_test=1, seed=seed)
    mails = MailStore(path)
    try:
        yield Material(email_search.make_rollout(model, mails), mails.scenarios("train"))
    finally:
        mails.close()


#: The bandit's prompts are "item 0" to "item 7", and these the characters that it is to say.
ITEMS, WANTED = 8, frozenset("aeiou")


def _bandit(
    model: ChatART, _folder: Path, seed: int, count: int
) -> AbstractContextManager[Material]:
    async def rollout(scenario: int) -> Run:
        async with capture(scenario=str(scenario)) as run:
            said = (await model.ainvoke(f"item {(scenario + seed) % ITEMS}")).text
            run.reward = sum(one in WANTED for one in said) / max(8, len(said))
        return run

    return nullcontext(Material(rollout, range(count)))


def _game(model: ChatART, _folder: Path, seed: int, count: int) -> AbstractContextManager[Material]:
    rollout = codenames.make_rollout(model, model)
    return nullcontext(Material(rollout, boards("train", count, seed)))


TASKS = {
    one.name: one
    for one in (
        Task("demo", 0.65, 384, 197_152, 1536, 768, 48, lambda _: email_search.BASE_MODEL, _demo),
        Task(
            "bandit",
            0.30,
            384,
            49_936,
            2304,
            1280,
            8,
            lambda folder: save_model(folder / "random"),
            _bandit,
        ),
        Task(
            "game",
            0.45,
            384,
            182_240,
            2560,
            1024,
            24,
            lambda _: codenames.BASE_MODEL,
            _game,
        ),
    )
}

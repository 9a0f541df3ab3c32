"""Trainers of small fits, what their runs do, and what they show."""

import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from langchain_art import ChatART, Trainer, capture
from langchain_art.tracing.run import Run
from langchain_art.wire import LoraConfig
from tests.support.chat_models import model_of
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id

SMALL = LoraConfig(rank=2, alpha=4.0)


class Heard(Console):
    """A console that keeps what it shows."""

    def __init__(self, width: int = 1000) -> None:
        self._shown = io.StringIO()
        super().__init__(file=self._shown, width=width)

    @property
    def said(self) -> str:
        return self._shown.getvalue()


def trainer_of(server: LiveServer, out: Path, *policies: str, **options: Any) -> Trainer:
    """A trainer of policies on a server; of one of its own, if none is named."""
    models = [model_of(server, policy) for policy in policies or (new_id("p"),)]
    chosen: dict[str, Any] = {"group_size": 4, "groups_per_step": 2, "lora": SMALL}
    chosen |= {"out_dir": out, "console": Heard()}
    return Trainer(models, **(chosen | options))


def said(trainer: Trainer) -> str:
    """All that a trainer has shown."""
    shown = trainer._display.console
    assert isinstance(shown, Heard)
    return shown.said


def asking(
    reward: Callable[[Run, str], float | None], *models: ChatART
) -> Callable[[dict[str, Any]], Awaitable[Run]]:
    """A rollout that asks each model a scenario's question; the reward is of the last reply."""

    async def rollout(scenario: dict[str, Any]) -> Run:
        text = ""
        async with capture(scenario=scenario["id"]) as run:
            for model in models:
                text = (await model.ainvoke(scenario["question"])).text
            run.reward = reward(run, text)
        return run

    return rollout

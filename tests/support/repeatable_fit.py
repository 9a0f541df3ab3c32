"""A fit whose rollouts may be made by workers, and the same as one that is to be killed."""

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from langchain_art import ChatART, Run, TrainConfig, Trainer, capture
from langchain_art.training.fit_state import History
from langchain_art.training.records import FitResult
from langchain_art.wire import LoraConfig

NAME = "tests.support.repeatable_fit:rollout"
STEPS = 3
FILES = ("adapter_model.safetensors", "optimizer.safetensors")
#: What is done at the start and the end of each model call.
hooks: list[Callable[[], None]] = []


async def rollout(scenario: dict[str, Any]) -> Run:
    """Two calls of the same text at once, and one of what they said."""
    model = ChatART(model=scenario["policy"], max_tokens=5, temperature=1.0)

    async def call(text: str) -> str:
        for hook in hooks:
            hook()
        reply = await model.ainvoke(text)
        for hook in hooks:
            hook()
        return reply.text

    async with capture(scenario=scenario["id"]) as told:
        parts = await asyncio.gather(*[call(f"Say {scenario['id']}")] * 2)
        last = await call(f"And after {' '.join(sorted(parts))}?")
        told.reward = sum(last.encode()) % 97 / 97 + told.rng.random()
    return told


def fit(base_url: str, policy: str, out: Path, **options: Any) -> FitResult:
    """The fit of this folder, or what is left of it."""
    trainer = Trainer(
        ChatART(model=policy, base_url=base_url),
        group_size=2,
        groups_per_step=2,
        seed=5,
        config=TrainConfig(learning_rate=1e-2, optimizer_steps=2),
        lora=LoraConfig(rank=2, alpha=4.0),
        dynamic_sampling_rounds=1,
        out_dir=out,
        console=Console(file=io.StringIO()),
        **options,
    )
    scenarios = [{"id": str(number), "policy": policy} for number in range(10)]
    return trainer.fit_sync(
        rollout, scenarios[2:], steps=STEPS, eval_scenarios=scenarios[:2], eval_every=2
    )


def digests(data_dir: Path, policy: str) -> list[list[str]]:
    """Digests of the files of each version that the fit has made."""
    made = [data_dir / "adapters" / policy / str(step + 1) for step in range(STEPS)]
    return [[sha256((one / name).read_bytes()).hexdigest() for name in FILES] for one in made]


def mortal_fit(base_url: str, policy: str, out: Path, events: Path, kills: dict[int, int]) -> None:
    """As `fit`, with rollouts in this process, which is killed at one of its events.

    Events are numbered by the size of the file `events`, in all processes of a fit together: the
    start and the end of a model call, and of a change to the fit's history.

    Args:
        kills: number of an event -> process to kill then; 0: this one.
    """

    def event() -> None:
        with events.open("ab") as file:
            file.write(b".")
        if (victim := kills.get(events.stat().st_size)) is not None:
            os.kill(victim or os.getpid(), signal.SIGKILL)

    def between(done: Callable[..., Any]) -> Callable[..., Any]:
        def both(*given: Any) -> Any:
            event()
            found = done(*given)
            event()
            return found

        return both

    hooks.append(event)
    for name in ("append", "begin", "end"):
        setattr(History, name, between(getattr(History, name)))
    os.environ["ART_BASE_URL"] = base_url
    fit(base_url, policy, out)


if __name__ == "__main__":
    mortal_fit(*sys.argv[1:3], *map(Path, sys.argv[3:5]), dict(json.loads(sys.argv[5])))

"""A fit in a process of its own, to be killed: rollouts of two calls, with arbitrary rewards."""

import asyncio
import io
from pathlib import Path

from rich.console import Console

from langchain_art import ChatART, Run, TrainConfig, Trainer, capture

#: Of a step.
GROUPS, SIZE = 4, 4


def fit(base_url: str, out: Path, steps: int) -> None:
    """Go on with the fit of this folder, until it has so many steps."""
    model = ChatART(model="tiny", base_url=base_url, max_tokens=4)

    async def rollout(scenario: int) -> Run:
        async with capture(scenario=str(scenario)) as told:
            first = await model.ainvoke(f"Say {scenario}, {told.id}")
            await asyncio.sleep(0.02)
            second = await model.ainvoke(f"And after {first.text}?")
            told.reward = (sum(second.text.encode()) % 97) / 97
        return told

    trainer = Trainer(
        model,
        group_size=SIZE,
        groups_per_step=GROUPS,
        config=TrainConfig(learning_rate=1e-4),
        out_dir=out,
        console=Console(file=io.StringIO()),
    )
    trainer.fit_sync(rollout, list(range(32)), steps=steps)

"""Our racer: the triage agent, trained by `Trainer` through a server of its own, all defaults."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.racing.plan import Told, say
from examples.triage.tickets import tickets
from examples.triage.train import make_rollout
from langchain_art import ChatART, LocalServer, StepRecord, Trainer

POLICY = "triage"


def main() -> None:
    folder = Path(sys.argv[1])
    told = Told.read(folder)
    data = folder / "server"
    with LocalServer(told.base, policies=[POLICY], data_dir=data) as server:
        model = ChatART(model=POLICY, base_url=server.base_url, max_tokens=told.max_tokens)
        quiet = Console(file=io.StringIO())
        trainer = Trainer(model, out_dir=folder / "fit", seed=told.seed, console=quiet)

        def after(record: StepRecord) -> None:
            adapter = data / "adapters" / POLICY / str(record.version)
            say(record.step, adapter, record.reward_mean)

        known = tickets("train", told.messages, told.seed)
        asyncio.run(trainer.fit(make_rollout(model), known, steps=told.steps, on_step=after))


if __name__ == "__main__":
    main()

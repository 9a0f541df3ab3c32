"""Our racer: the demo's agent, trained by `Trainer` through a server of its own."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.racing.plan import Told, say
from examples.email_search.inbox import MailStore
from examples.email_search.train import make_rollout
from langchain_art import ChatART, LocalServer, LoraConfig, StepRecord, TrainConfig, Trainer

POLICY = "racer"


def main() -> None:
    folder = Path(sys.argv[1])
    told = Told.read(folder)
    mails = MailStore(told.mails)
    data = folder / "server"
    with LocalServer(told.base, policies=[], data_dir=data) as server:
        model = ChatART(model=POLICY, base_url=server.base_url, max_tokens=told.max_tokens)
        trainer = Trainer(
            model,
            group_size=told.size,
            groups_per_step=told.groups,
            concurrency=told.groups * told.size,
            config=TrainConfig(
                learning_rate=told.rate, advantage="standardized", tokens_per_microbatch=4096
            ),
            out_dir=folder / "fit",
            seed=told.seed,
            lora=LoraConfig(seed=told.seed),
            console=Console(file=io.StringIO()),
        )

        def after(record: StepRecord) -> None:
            if record.step % told.every == 0:
                say(
                    record.step,
                    data / "adapters" / POLICY / str(record.version),
                    record.reward_mean,
                )

        scenarios = mails.scenarios("train")
        rollout = make_rollout(model, mails)
        asyncio.run(trainer.fit(rollout, scenarios, steps=told.steps, on_step=after))


if __name__ == "__main__":
    main()

"""Evaluate a version on held-out questions: ``python -m examples.email_search.evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from examples.email_search.inbox import MailStore, build
from examples.email_search.train import HELD_OUT, MAX_TOKENS, POLICY, make_rollout
from langchain_art import ChatART, Trainer


def main(
    model: Annotated[str, typer.Argument(help="email-agent, email-agent@7, or the base")] = POLICY,
    base_url: Annotated[str, typer.Option(help="Where the server is")] = "http://localhost:8000/v1",
    seed: Annotated[int, typer.Option(help="Of the mails")] = 1000,
    n: Annotated[int, typer.Option(help="Held-out questions")] = HELD_OUT,
    greedy: Annotated[bool, typer.Option(help="Temperature 0 instead of 1")] = False,
    database: Annotated[Path, typer.Option(help="Made if missing")] = Path("out/eval.sqlite3"),
) -> None:
    """Mean reward on questions whose project and event never met in training."""
    database.parent.mkdir(parents=True, exist_ok=True)
    mails = MailStore(build(database, n_train=1, n_test=n, seed=seed))
    chat = ChatART(
        model=model,
        base_url=base_url,
        max_tokens=MAX_TOKENS,
        temperature=0.0 if greedy else None,
    )
    trainer = Trainer(chat, concurrency=128)
    result = trainer.evaluate_sync(make_rollout(chat, mails), mails.scenarios("test"))
    print(f"{result.version or model}: {result}")


if __name__ == "__main__":
    typer.run(main)

"""The e-mail agent's rollout by a name, for workers: its scenarios say where their mails are."""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from examples.email_search.inbox import MailStore, Scenario, Split
from examples.email_search.train import Rollout, make_rollout
from langchain_art import ChatART, Run

MODEL = "tiny"


def scenarios(mails: Path, split: Split) -> list[dict[str, Any]]:
    """Those of a database of mails, as JSON."""
    store = MailStore(mails)
    try:
        return [asdict(one) | {"mails": str(mails)} for one in store.scenarios(split)]
    finally:
        store.close()


async def rollout(scenario: dict[str, Any]) -> Run:
    """One run of the agent."""
    given = dict(scenario)
    return await _of(given.pop("mails"))(Scenario(**given))


@cache
def _of(mails: str) -> Rollout:
    return make_rollout(ChatART(model=MODEL, max_tokens=32), MailStore(Path(mails)))

"""The e-mail example with a reviewer: what he says of runs, and learning from it end to end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.email_search import review as demo
from examples.email_search.inbox import MailStore
from langchain_art import ArtClient
from langchain_art.cli.main import app
from tests.support.examples import refusal
from tests.support.live_server import LiveServer
from tests.support.mails import mails_of
from tests.support.steps_of_a_fit import new_id


@pytest.fixture
def mails(tmp_path: Path) -> Iterator[MailStore]:
    store = mails_of(tmp_path, 2, 2)
    yield store
    store.close()


def test_reviews_are_kept_trained_on_and_measured(
    art_server: LiveServer, mails: MailStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "QUESTIONS", 2)
    monkeypatch.setattr(demo, "HELD_OUT_RUNS", 1)
    monkeypatch.setattr(demo, "PREFERENCE_STEPS", 2)
    monkeypatch.setattr(demo, "REWARDS", demo.REWARDS.model_copy(update={"optimizer_steps": 2}))
    policy = new_id("reviewed")
    found = demo.Demo(art_server.base_url, mails, 0, policy).run()
    assert sum(found["marks"].values()) == 10
    for all_of_them, kind in ((10, "runs"), (found["corrections"], "corrections")):
        left_out = sum(found[f"{kind}_left_out"].values())
        assert found[f"{kind}_trained"] + left_out == all_of_them
    assert found["held_out"] == 2 and 0 <= found["before"]["low"] <= found["before"]["high"] <= 1
    # He marks 1 what answers right, and more than 0 much of what does not.
    assert found["marks_before"]["mean"] >= found["before"]["mean"]
    changed = found["marks_after"]["mean"] - found["marks_before"]["mean"]
    assert found["marks_after_minus_before"]["mean"] == pytest.approx(changed)
    assert found["preference"]["won"] + found["preference"]["lost"] <= 2
    first, last = found["chosen_logprob"]
    assert last > first
    with ArtClient(art_server.base_url) as client:
        kept = client.reviews(policy=policy)
        jobs = client.jobs(policy)
        version = client.policy(policy).version
    assert sum(one.kind == "correction" for one in kept) == found["corrections"]
    assert {one.source for one in kept} == {"scripted"}
    # As many steps by chance, from the base: the same jobs once more.
    assert len(jobs) == version and len(jobs) % 2 == 0
    half = len(jobs) // 2
    assert [job.base_version for job in jobs][half] == 0
    told = "\n".join(demo.lines(found))
    assert "10 runs marked" in told and "as many random steps" in told
    assert "the reviewer prefers the runs after in" in told


def test_options_of_the_other_demo_are_refused() -> None:
    assert "No such option" in refusal(demo.main, "--reward", "answer")
    with pytest.raises(SystemExit):
        app(["demo", "--review", "paid"])

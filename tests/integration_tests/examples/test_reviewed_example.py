"""The e-mail example with a reviewer: what he says of runs, and learning from it end to end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.email_search import review as demo
from examples.email_search.inbox import Inbox, MailStore, Scenario, build
from examples.email_search.scripted_reviewer import READ_MAIL, find_mail, review
from langchain_art import ArtClient
from langchain_art.cli.main import app
from langchain_art.wire import ReviewPlan, Trajectory, Turn
from tests.support.live_server import LiveServer


@pytest.fixture
def mails(tmp_path: Path) -> Iterator[MailStore]:
    store = MailStore(build(tmp_path / "mails.sqlite3", n_train=40, n_test=6, seed=5))
    yield store
    store.close()


def said(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def run_of(scenario: Scenario, *steps: tuple[dict[str, Any], str]) -> Trajectory:
    """A stored run: each step is a reply and what its tool returned."""
    asked: list[Any] = [
        {"role": "system", "content": "Find the mail."},
        {"role": "user", "content": scenario.question},
    ]
    turns: list[Turn] = []
    for number, (reply, result) in enumerate(steps):
        turns.append(Turn(call_id=f"c{number}", messages=tuple(asked), reply=reply))
        asked = [*asked, reply, {"role": "tool", "content": result}]
    return Trajectory(id="t", scenario=scenario.id, turns=tuple(turns))


def right_way(scenario: Scenario, inbox: Inbox) -> list[tuple[dict[str, Any], str]]:
    event = f"{scenario.project} {scenario.event}"
    mail = find_mail(event, inbox)
    assert mail.date == scenario.answer
    return [
        (said("search", f'{{"query": "{event}"}}'), inbox.search(event)),
        (said("read", f'{{"mail_id": {mail.id}}}'), mail.text),
        (said("answer", f'{{"text": "{mail.date}"}}'), mail.date),
    ]


def test_the_reviewer_finds_what_is_right_by_reading(mails: MailStore) -> None:
    for scenario in mails.scenarios("train"):
        inbox = mails.inbox(scenario.inbox)
        (mark,) = review(run_of(scenario, *right_way(scenario, inbox)), inbox, 1.0)
        assert (mark.kind, mark.value, mark.name) == ("reward", 1.0, "human_reward")


def test_he_corrects_the_first_call_that_he_would_have_made_otherwise(mails: MailStore) -> None:
    scenario = mails.scenarios("train")[0]
    inbox = mails.inbox(scenario.inbox)
    search, read, answer = right_way(scenario, inbox)
    lost = (said("search", '{"query": "nonsense"}'), "No mail found.")
    wrong = (said("answer", '{"text": "30 February"}'), "30 February")
    broken = (said("read", '{"mail_id": '), "error")

    def reviewed(*steps: tuple[dict[str, Any], str]) -> tuple[float | None, dict[str, Any]]:
        mark, *corrected = review(run_of(scenario, *steps), inbox, 1.0)
        return mark.value, {str(one.call_id): _call(one.correction) for one in corrected}

    def _call(reply: dict[str, Any] | None) -> Any:
        function = (reply or {})["tool_calls"][0]["function"]
        return function["name"], function["arguments"]

    wanted = {
        step: _call(reply) for step, (reply, _) in zip("sra", (search, read, answer), strict=True)
    }
    assert reviewed(lost, search, read, wrong) == (READ_MAIL, {"c0": wanted["s"]})
    assert reviewed(search, read, wrong) == (READ_MAIL, {"c2": wanted["a"]})
    assert reviewed(wrong) == (0.0, {"c0": wanted["s"]})
    assert reviewed(search, broken, wrong) == (0.0, {"c1": wanted["r"]})
    assert reviewed(search, read) == (READ_MAIL, {})  # it ended without an answer
    other = (said("search", f'{{"query": "{scenario.event} {scenario.project}"}}'), search[1])
    assert reviewed(other, wrong) == (0.0, {"c1": wanted["r"]})


def test_the_control_has_the_same_rewards_and_pairs_in_another_order() -> None:
    rewards = {f"t{number}": float(number) for number in range(20)}
    pairs = [(f"better-{number}", f"worse-{number}") for number in range(20)]
    about: dict[str, Any] = {"verdicts": (), "turns": {}, "compared": ()}
    planned = ReviewPlan(groups=(tuple(rewards),), rewards=rewards, pairs=tuple(pairs), **about)
    dealt = demo.by_chance(planned, 0)
    turned = dealt.pairs
    assert sorted(dealt.rewards.values()) == sorted(rewards.values()) and dealt.rewards != rewards
    assert [set(pair) for pair in turned] == [set(pair) for pair in pairs]
    assert 0 < sum(one != other for one, other in zip(turned, pairs, strict=True)) < 20


def test_reviews_are_kept_trained_on_and_measured(
    art_server: LiveServer, mails: MailStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "QUESTIONS", 3)
    monkeypatch.setattr(demo, "PREFERENCE_STEPS", 2)
    policy = f"reviewed-{uuid.uuid4().hex[:8]}"
    found = demo.Demo(art_server.base_url, mails, 0, policy).run()
    assert (
        sum(found["marks"].values())
        == 15
        == found["runs_trained"] + sum(found["runs_left_out"].values())
    )
    assert (
        found["corrections_trained"] + sum(found["corrections_left_out"].values())
        == (found["corrections"])
    )
    assert found["held_out"] == 6 and 0 <= found["before"]["low"] <= found["before"]["high"] <= 1
    # He marks 1 what answers right, and more than 0 much of what does not.
    assert found["marks_before"]["mean"] >= found["before"]["mean"]
    changed = found["marks_after"]["mean"] - found["marks_before"]["mean"]
    assert found["marks_after_minus_before"]["mean"] == pytest.approx(changed)
    assert found["preference"]["won"] + found["preference"]["lost"] <= 6
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
    assert "15 runs marked" in told and "as many random steps" in told
    assert "the reviewer prefers the runs after in" in told


def test_options_of_the_other_demo_are_refused() -> None:
    done = CliRunner().invoke(_program(), ["--reward", "answer"])
    assert done.exit_code == 2 and "No such option" in done.output
    with pytest.raises(SystemExit):
        app(["demo", "--review", "paid"])


def _program() -> Any:
    import typer

    program = typer.Typer()
    program.command()(demo.main)
    return program

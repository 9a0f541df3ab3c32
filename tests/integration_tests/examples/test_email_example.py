"""The e-mail example: its agent, its judge and its reviewer, what they teach; its demo and loop."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult

from examples import loop
from examples.email_search import review, train
from examples.email_search.inbox import MailStore, build
from examples.email_search.scripted_judge import ScriptedJudge
from examples.email_search.train import MAX_TOKENS, make_rollout, ruler
from examples.support.command import train_command
from examples.support.control import shuffled
from examples.support.mail_words import split_pairs
from langchain_art import (
    ArtClient,
    LRSchedule,
    RulerEvaluator,
    TrainConfig,
    TrajectoryGroup,
    gather,
)
from langchain_art.cli.main import app
from langchain_art.evaluators import calibrate
from langchain_art.training import fit_state
from langchain_art.training.records import StepRecord
from tests.support.chat_models import model_of
from tests.support.examples import refusal
from tests.support.live_server import LiveServer
from tests.support.mails import check_exact_runs, mails_of
from tests.support.soak import count, in_soak, share
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import trainer_of

STEPS, CONTROL, GROUPS, HELD_OUT = 5, count(1, 2), count(2, 16), count(2, 120)


def test_training_and_held_out_questions_are_disjoint(tmp_path: Path) -> None:
    mails = mails_of(tmp_path, 200, 100)
    pairs = split_pairs()
    assert not set(pairs["train"]) & set(pairs["test"])
    train, test = mails.scenarios("train"), mails.scenarios("test")
    assert not {(s.project, s.event) for s in train} & {(s.project, s.event) for s in test}
    assert not {s.inbox for s in train} & {s.inbox for s in test}
    again = MailStore(build(tmp_path / "again.sqlite3", n_train=200, n_test=100, seed=5))
    assert again.scenarios("test") == test


def test_any_query_gets_an_answer(tmp_path: Path) -> None:
    mails = mails_of(tmp_path, 2, 1)
    inbox = mails.inbox(mails.scenarios("train")[0].inbox)
    for query in ("", '"', "NEAR(", "a AND", "x*", "m:1", "; DROP TABLE mails", "é"):
        assert isinstance(inbox.search(query), str)
    assert inbox.read(-1) == inbox.read(10**9) == "No such mail."


async def test_runs_are_captured_recorded_and_trained_exactly(
    art_server: LiveServer, tmp_path: Path
) -> None:
    await check_exact_runs(art_server, tmp_path)


def gain(server: LiveServer, folder: Path, policy: str, steps: int, evaluator: Any) -> float:
    """By how much the reward on held-out questions rises in a fit."""
    folder.mkdir()
    mails = mails_of(folder, GROUPS * steps, HELD_OUT)
    config = TrainConfig(
        learning_rate=3e-3,
        # At a constant learning rate the reward fell for one step now and then, which a last step
        # must not: it decays.
        schedule=LRSchedule(warmup_steps=2, decay_steps=5),
        optimizer_steps=4,
        tokens_per_microbatch=4096,
    )
    trainer = trainer_of(
        *(server, folder / "fit", policy),
        evaluator=evaluator,
        on_collapse="warn",  # to go back from what fell would be learning from the reward
        group_size=8,
        groups_per_step=GROUPS,
        concurrency=128,
        config=config,
        lora=None,
    )
    result = trainer.fit_sync(
        make_rollout(model_of(server, policy, max_tokens=MAX_TOKENS), mails),
        mails.scenarios("train"),
        steps=steps,
        eval_scenarios=mails.scenarios("test"),
    )
    assert (folder / "fit" / "history.jsonl").read_text().count("\n") == steps + 2
    assert result.before is not None and result.after is not None
    assert result.before.n == result.after.n == HELD_OUT
    assert result.after.versions == (f"{policy}@{steps}",)
    for step in result.history:
        assert step.reward_std and step.results[policy].metrics["logprob_gap_mean"] <= 1e-5
    return result.after.mean - result.before.mean


# In `make test` one step, by rewards that were dealt out anew. One by rewards as they are is there
# shown by `test_wrap_existing.py`, and that they rise by `training/test_canary.py`.
@pytest.mark.soak("L7", STEPS, "steps of the e-mail agent by rewards, and 2 by shuffled ones")
@pytest.mark.slow
def test_the_agent_learns_from_the_reward_and_not_from_training(
    art_server: LiveServer, tmp_path: Path
) -> None:
    control = gain(art_server, tmp_path / "control", "agent-control", CONTROL, shuffled(0))
    if share() >= 1:
        learned = gain(art_server, tmp_path / "reward", "agent", STEPS, None)
        assert learned >= 0.25 and control <= 0.2, (learned, control)
        print(f"{learned:+.3f} by rewards, {control:+.3f} by shuffled ones")  # noqa: T201


# --- a judge --------------------------------------------------------------------------------------


class Overheard(ScriptedJudge):
    """The scripted judge, with what it was asked."""

    asked: list[str] = []  # noqa: RUF012 - a field: each instance has its own

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.asked.append(messages[-1].text)
        return super()._generate(messages, *args, **kwargs)


@pytest.fixture
def mails(tmp_path: Path) -> Iterator[MailStore]:
    store = mails_of(tmp_path, 320, 120)
    yield store
    store.close()


@pytest.mark.soak
async def test_the_judge_knows_no_answer_and_agrees_with_those_who_do(
    art_server: LiveServer, mails: MailStore
) -> None:
    model = model_of(art_server, max_tokens=48)
    scenarios = mails.scenarios("train")[: count(8, 24)]
    done = await gather(make_rollout(model, mails), scenarios, group_size=8, seed=0)
    judge = Overheard()
    evaluator = RulerEvaluator(judge, context=None)
    rewards = {run.id: run.reward for run in done.trajectories if run.reward is not None}
    found = await calibrate(evaluator, [_marked(group) for group in done.groups], rewards)
    assert found.unjudged == 0 and found.kendall.value is not None
    assert found.kendall.value >= 0.75, found
    assert judge.asked and not any("SECRET" in page for page in judge.asked)


def _marked(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with a scenario that cannot be missed."""
    secret = dict.fromkeys(group.metadata["scenario"], "SECRET")
    return group.model_copy(update={"metadata": {"scenario": secret}})


@in_soak
@pytest.mark.soak("L6", 1, "fit of 1,024 runs on a judge's scores")
@pytest.mark.slow
def test_the_agent_learns_from_the_judge_alone(
    art_server: LiveServer, mails: MailStore, tmp_path: Path
) -> None:
    evaluator = ruler("scripted", tmp_path / "judge.sqlite3")
    config = TrainConfig(
        learning_rate=3e-3,
        schedule=LRSchedule(warmup_steps=2, decay_steps=8),
        optimizer_steps=2,
        tokens_per_microbatch=4096,
    )
    sizes = {"group_size": 8, "groups_per_step": 16, "concurrency": 128, "lora": None}
    trainer = trainer_of(
        art_server, tmp_path / "fit", "agent-judged", evaluator=evaluator, config=config, **sizes
    )
    result = trainer.fit_sync(
        make_rollout(model_of(art_server, "agent-judged", max_tokens=48), mails, judged=True),
        mails.scenarios("train"),
        steps=8,
        eval_scenarios=mails.scenarios("test"),
    )
    assert result.before is not None and result.after is not None
    assert result.before.n == result.after.n == 120
    assert result.after.mean - result.before.mean >= 0.25, (result.before, result.after)
    groups = 128 + sum(step.resampled for step in result.history)
    assert evaluator.spent.groups == groups and evaluator.spent.unjudged == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--judge", "openai/o3"], "add --reward ruler"),
        (["--reward", "ruler", "--control"], "no --reward ruler"),
        (["--reward", "rule"], "answer"),
    ],
)
def test_options_of_the_demo_that_would_be_ignored_are_refused(
    options: list[str], words: str, tmp_path: Path
) -> None:
    assert words in refusal(train.main, *options, "--out", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


# --- a reviewer -----------------------------------------------------------------------------------


def test_reviews_are_kept_trained_on_and_measured(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mails = mails_of(tmp_path, 2, 2)
    monkeypatch.setattr(review, "QUESTIONS", 2)
    monkeypatch.setattr(review, "HELD_OUT_RUNS", 1)
    monkeypatch.setattr(review, "PREFERENCE_STEPS", 2)
    monkeypatch.setattr(review, "REWARDS", review.REWARDS.model_copy(update={"optimizer_steps": 2}))
    policy = new_id("reviewed")
    found = review.Demo(art_server.base_url, mails, 0, policy).run()
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
    told = "\n".join(review.lines(found))
    assert "10 runs marked" in told and "as many random steps" in told
    assert "the reviewer prefers the runs after in" in told


def test_options_of_the_other_demo_are_refused() -> None:
    assert "No such option" in refusal(review.main, "--reward", "answer")
    with pytest.raises(SystemExit):
        app(["demo", "--review", "paid"])


# --- the demo and the loop on the client ----------------------------------------------------------


def test_the_demo_goes_on_where_it_was_stopped(
    art_server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"held_out": 2, "groups_per_step": 2, "group_size": 2}
    small = replace(train.DEMO, policies=("demo-resumed",), **sizes)
    main = train_command(small, "The demo, with little.", train.options)
    options: dict[str, Any] = {"steps": 2, "out": tmp_path, "base_url": art_server.base_url}
    append = fit_state.History.append

    def stopped(self: fit_state.History, record: Any) -> None:
        append(self, record)
        if isinstance(record, StepRecord):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fit_state.History, "append", stopped)
        with pytest.raises(KeyboardInterrupt):
            main(**options)
    assert "Run the same again to go on" in capsys.readouterr().out

    main(**options)
    assert "Going on after step 1" in capsys.readouterr().out
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["steps"] == 2
    with ArtClient(art_server.base_url) as client:
        jobs = len(client.jobs("demo-resumed"))
    assert jobs == 2, "each step once"

    main(**options)
    assert "Finished already: 2 steps" in capsys.readouterr().out
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again["after"] == figures["after"]
    assert abs(again["seconds"] - figures["seconds"]) < 1, "those of the fit, not of looking at it"

    with pytest.raises(typer.Exit):
        main(**options, seed=1)
    said = capsys.readouterr().out
    assert "seed 0 -> 1" in said.replace("\n", " ") and "--fresh erases" in said


async def test_a_step_of_it_is_a_version(
    art_server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    await loop.train(steps=2, scenarios=2, runs=4, held_out=2)
    said = capsys.readouterr().out
    found = [int(version) for version in re.findall(rf"reward [\d.]+, {loop.POLICY}@(\d)", said)]
    with ArtClient(art_server.base_url) as client:
        assert client.policy(loop.POLICY).version == found[-1]
        runs = client.trajectories(50)
        jobs = client.jobs(loop.POLICY)
    assert (
        sum((one.turns[0].model or "").startswith(f"{loop.POLICY}@") for one in runs) == 2 * 2 * 4
    )
    assert [job.state for job in jobs] == ["succeeded"] * 2
    assert said.count("held out") == 2

"""The e-mail example: the agent over real tools, the agreement of both engines, the learning."""

from pathlib import Path
from typing import Any

import pytest

from examples.email_search.inbox import MailStore, build
from examples.email_search.train import MAX_TOKENS, make_rollout
from examples.support.control import shuffled
from examples.support.mail_words import split_pairs
from langchain_art import LRSchedule, TrainConfig
from tests.support.chat_models import model_of
from tests.support.live_server import LiveServer
from tests.support.mails import check_exact_runs, mails_of
from tests.support.soak import count, share
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

"""The e-mail example with a judge alone: what the judge is shown, how good it is, the learning."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult
from typer.testing import CliRunner

from examples.email_search.inbox import MailStore, build
from examples.email_search.scripted_judge import READ_MAIL, ScriptedJudge, verdicts
from examples.email_search.train import main, make_rollout, ruler
from examples.support.scripted_judge import Block, read_runs
from langchain_art import (
    ChatART,
    LRSchedule,
    RulerEvaluator,
    TrainConfig,
    Trainer,
    TrajectoryGroup,
    gather,
)
from langchain_art.evaluators import calibrate, own_rewards
from tests.support.live_server import LiveServer

QUESTION = ("user", 'When is "Falcon audit"?')
RIGHT = ("result", "From: Ana\nFalcon audit moves from 2 May to 14 March.")


def answers(text: str) -> Block:
    return ("call", f'answer {{"text": "{text}"}}')


@pytest.mark.parametrize(
    ("blocks", "score"),
    [
        ([RIGHT, answers("14 March")], 1.0),
        ([RIGHT, answers("14 March.")], 1.0),
        ([RIGHT, answers("2 May")], READ_MAIL),
        ([RIGHT, answers("14 March"), answers("14 March")], READ_MAIL),
        ([RIGHT], READ_MAIL),
        ([RIGHT, ("call", 'answer {"text": ')], READ_MAIL),
        ([answers("14 March")], 1.0),  # another run of the group bears it out
        ([answers("3 June")], 0.0),
        ([("result", "Falcon audit photos by 3 June."), answers("3 June")], 0.0),
        ([("result", "Falcon audits: Raven audit is on 3 June."), answers("3 June")], 0.0),
        ([("assistant", "Falcon audit is on 3 June."), answers("3 June")], 0.0),
        ([], 0.0),
    ],
)
def test_the_scripted_judge_follows_its_rule(blocks: list[Block], score: float) -> None:
    runs = {"us": [QUESTION, *blocks], "it": [QUESTION, RIGHT]}
    assert verdicts(runs)["us"][0] == score


def test_parts_and_notes_of_a_prompt_are_put_together() -> None:
    page = (
        "mark k7\n<k7 tools> search(query: string)\n<k7 note n1> a long\nmail\n"
        '<k7 part p1>\n<k7 user> When is "Falcon audit"?\n<k7 part p2 follows p1>\n<k7 call> x\n'
        "<k7 run abc follows p2>\n<k7 result = n1>\n<k7 run def follows p1>\n"
        "<k7 assistant> 1 &lt; 2 &amp; <k8 run>\n<k7 end>\nScore these 2 runs: abc, def."
    )
    asked = ("user", 'When is "Falcon audit"?')
    assert read_runs(page) == {
        "abc": [asked, ("call", "x"), ("result", "a long\nmail")],
        "def": [asked, ("assistant", "1 < 2 & <k8 run>")],
    }
    with pytest.raises(ValueError, match="begins with its mark"):
        read_runs("Score these runs.")


class Overheard(ScriptedJudge):
    """The scripted judge, with what it was asked."""

    asked: list[str] = []  # noqa: RUF012 - a field: each instance has its own

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.asked.append(messages[-1].text)
        return super()._generate(messages, *args, **kwargs)


@pytest.fixture
def mails(tmp_path: Path) -> Iterator[MailStore]:
    store = MailStore(build(tmp_path / "mails.sqlite3", n_train=320, n_test=120, seed=5))
    yield store
    store.close()


async def test_the_judge_knows_no_answer_and_agrees_with_those_who_do(
    art_server: LiveServer, mails: MailStore
) -> None:
    model = ChatART(model="tiny", base_url=art_server.base_url, max_tokens=48)
    scenarios = mails.scenarios("train")[:24]
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


async def test_judged_training_runs_have_no_reward_of_their_own(
    art_server: LiveServer, mails: MailStore
) -> None:
    model = ChatART(model="tiny", base_url=art_server.base_url, max_tokens=48)
    rollout = make_rollout(model, mails, judged=True)
    train, test = mails.scenarios("train")[:2], mails.scenarios("test")[:2]
    done = await gather(rollout, [*train, *test], group_size=2)
    own = [own_rewards(group) for group in done.groups]
    assert own[:2] == [[None, None], [None, None]]
    assert all(reward in (0.0, 1.0) for rewards in own[2:] for reward in rewards)


@pytest.mark.slow
def test_the_agent_learns_from_the_judge_alone(
    art_server: LiveServer, mails: MailStore, tmp_path: Path
) -> None:
    model = ChatART(model="agent-judged", base_url=art_server.base_url, max_tokens=48)
    evaluator = ruler("scripted", tmp_path / "judge.sqlite3")
    trainer = Trainer(
        model,
        evaluator=evaluator,
        concurrency=128,
        groups_per_step=16,
        config=TrainConfig(
            learning_rate=3e-3,
            schedule=LRSchedule(warmup_steps=2, decay_steps=8),  # see test_email_example
            optimizer_steps=2,
            tokens_per_microbatch=4096,
        ),
        out_dir=tmp_path / "fit",
    )
    result = asyncio.run(
        trainer.fit(
            make_rollout(model, mails, judged=True),
            mails.scenarios("train"),
            steps=8,
            eval_scenarios=mails.scenarios("test"),
        )
    )
    assert result.before is not None and result.after is not None
    assert result.before.n == result.after.n == 120
    assert result.after.mean - result.before.mean >= 0.25, (result.before, result.after)
    assert evaluator.spent.groups == 128 and evaluator.spent.unjudged == 0


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
    program = typer.Typer()
    program.command()(main)
    done = CliRunner().invoke(program, [*options, "--out", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert words in done.output
    assert not (tmp_path / "none").exists()

"""The e-mail example with a judge alone: what the judge is shown, how good it is, the learning."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult

from examples.email_search.inbox import MailStore
from examples.email_search.scripted_judge import ScriptedJudge
from examples.email_search.train import main, make_rollout, ruler
from langchain_art import LRSchedule, RulerEvaluator, TrainConfig, TrajectoryGroup, gather
from langchain_art.evaluators import calibrate
from tests.support.chat_models import model_of
from tests.support.examples import refusal
from tests.support.live_server import LiveServer
from tests.support.mails import mails_of
from tests.support.soak import count, in_soak
from tests.support.trainers import trainer_of


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
        schedule=LRSchedule(warmup_steps=2, decay_steps=8),  # see test_email_example
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
    assert words in refusal(main, *options, "--out", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()

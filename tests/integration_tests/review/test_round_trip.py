"""The whole loop: an agent's runs, Langfuse, a person who sees only that, and a better agent."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from examples.email_search.agent import build_agent, reward
from examples.email_search.inbox import MailStore, Scenario
from examples.email_search.scripted_judge import verdicts
from examples.support.scripted_judge import Block
from langchain_art import (
    ArtClient,
    ChatART,
    Exporter,
    LRSchedule,
    TrainConfig,
    TrainResult,
    Trajectory,
    capture,
    gather,
)
from langchain_art.errors import ConfigError
from langchain_art.export.exporter import push_spool
from langchain_art.export.ids import trace_id
from langchain_art.export.spool import Spool
from langchain_art.review.pull import pull
from langchain_art.wire import ReviewTraining
from tests.support.langfuse_server import LangfuseServer
from tests.support.langfuse_server.spans import Span
from tests.support.live_server import BASE_MODEL, ForkedServer, LiveServer
from tests.support.mails import mails_of
from tests.support.soak import count, share

DAYS, SCENARIOS, SIZE, HELD_OUT = count(2, 3), count(2, 16), count(4, 8), count(2, 200)


@pytest.fixture(scope="module")
def art_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of its own, with the whole model: one layer of it finds no mail."""
    with ForkedServer(tmp_path_factory.mktemp("trip") / "data", model=BASE_MODEL) as server:
        yield server


class Loop:
    """What a user does day by day, and what a person does in Langfuse meanwhile."""

    def __init__(
        self, server: LiveServer, langfuse: LangfuseServer, client: ArtClient, folder: Path
    ) -> None:
        self.langfuse, self.client, self.folder = langfuse, client, folder
        self.policy = f"trip-{uuid.uuid4().hex[:8]}"
        client.create_policy(self.policy)
        self.mails: MailStore = mails_of(folder, SCENARIOS * DAYS, HELD_OUT)
        model = ChatART(model=self.policy, base_url=server.base_url, max_tokens=48)
        self.agent = build_agent(model)
        self.spool = folder / "spool"
        self.seen: list[Trajectory] = []
        """Runs that went to Langfuse."""
        self.said: dict[str, float] = {}
        """By trace, what the person said."""

    def roll_out(self, scenarios: Sequence[Scenario], size: int, *, seen: bool) -> list[Trajectory]:
        """Runs of the agent; those that are `seen` go to Langfuse, with a reward that is wrong."""
        exporter = Exporter("langfuse", spool=self.spool) if seen else None

        async def rollout(scenario: Scenario) -> Any:
            async with capture(scenario=scenario.id, export=exporter) as run:
                asked = {"messages": [("user", scenario.question)]}
                state = await self.agent.ainvoke(asked, context=self.mails.inbox(scenario.inbox))
                right = reward(scenario, state)
                run.reward = 1.0 - right if seen else right
            return run

        seed = len(self.seen)
        found = asyncio.run(gather(rollout, scenarios, group_size=size, concurrency=128, seed=seed))
        assert not found.failed
        if exporter is not None:
            exporter.close()
            send_rest(self.spool)
            self.client.post_groups(found.groups)
            self.seen += found.trajectories
        return list(found.trajectories)

    def held_out(self) -> float:
        """The mean reward of the held-out questions, by their right answers."""
        runs = self.roll_out(self.mails.scenarios("test"), 1, seen=False)
        return fmean(run.reward or 0.0 for run in runs)

    def review(self) -> None:
        """A person reads the new traces, those of one question side by side, and scores each."""
        questions: dict[str, dict[str, list[Block]]] = {}
        for trace, spans in self.langfuse.traces().items():
            if trace not in self.said:
                asked = str(spans[0].metadata["scenario"])
                questions.setdefault(asked, {})[trace] = transcript(spans)
        for runs in questions.values():
            for trace, (value, why) in verdicts(runs).items():
                self.langfuse.annotate(trace, "human_reward", value, comment=why)
                self.said[trace] = value

    def train(self, runs: Sequence[Trajectory]) -> TrainResult:
        """A step by what was said of these runs."""
        config = TrainConfig(
            learning_rate=3e-3,
            credit="call",
            advantage="mean",
            schedule=LRSchedule(warmup_steps=2, decay_steps=DAYS + 1),  # see test_email_example
            optimizer_steps=4,
            tokens_per_microbatch=4096,
        )
        asked = ReviewTraining(policy=self.policy, config=config)
        planned = self.client.plan_reviews(asked)
        assert planned.rewards and not planned.turns
        assert all(self.said[trace_id(run)] == value for run, value in planned.rewards.items())
        assert set(planned.rewards) <= {run.id for run in runs}  # each day's are trained once
        [job] = self.client.train_reviews(asked)
        result = self.client.wait(job)
        check_step(runs, planned.rewards, planned.groups, result)
        return result


@pytest.mark.soak("R3", DAYS, f"days of {SCENARIOS * SIZE} reviewed runs")
@pytest.mark.slow
def test_what_a_person_says_of_traces_makes_the_agent_better(
    art_server: LiveServer, langfuse: LangfuseServer, tmp_path: Path, client: ArtClient
) -> None:
    loop = Loop(art_server, langfuse, client, tmp_path)
    train = loop.mails.scenarios("train")
    before = loop.held_out()
    for day in range(DAYS):
        if day == 0:  # one score is refused with 207, and its spans arrive all the same
            langfuse.refuses = first_score()
        runs = loop.roll_out(train[SCENARIOS * day : SCENARIOS * (day + 1)], SIZE, seen=True)
        if day == 0:
            assert len(list((loop.spool / "refused").iterdir())) == 1
            langfuse.refuses = lambda _: None
            check_traces(langfuse, runs)
            langfuse.spans += langfuse.spans[:100]  # sent again, and not merged yet
            langfuse.visible_after = 3600
        loop.review()
        if day == 0:  # nothing is to be seen yet, and nothing is lost by having looked
            assert pull(client, root=tmp_path).read == 0
            langfuse.visible_after = 0
        found = pull(client, root=tmp_path)
        assert (found.kept.new, found.kept.refused) == (len(runs), ())
        assert loop.train(runs).version == day + 1
    assert pull(client, root=tmp_path).kept.new == 0
    after = loop.held_out()
    assert all(client.trajectory(run.id).reward == run.reward for run in loop.seen)
    if share() >= 1:  # of 200 questions each the difference has a standard error of at most 0.05
        assert after - before >= 0.1, (before, after)
    print(f"{before:.3f} → {after:.3f} on {HELD_OUT} held-out questions")  # noqa: T201


def first_score() -> Callable[[Any], str | None]:
    """Refuses the first score, however often it is sent: a slow sender sends it again."""
    refused: list[str] = []

    def refuses(score: Any) -> str | None:
        if score.name == "reward" and not refused:
            refused.append(score.id)
        return "too many scores" if score.id in refused else None

    return refuses


def send_rest(spool: Path) -> None:
    """What `langchain-art review push --spool` does, should the machine have been slow."""
    deadline = time.monotonic() + 60
    while Spool(spool).count():
        try:
            push_spool(spool)
        except ConfigError:  # the exporter's own thread is in its last request
            assert time.monotonic() < deadline
            time.sleep(0.1)


def transcript(spans: Sequence[Span]) -> list[Block]:
    """What a trace shows: the last call's prompt, and its reply."""
    last = [span for span in spans if span.type == "generation"][-1]
    shown, said = last.told("input"), last.told("output")
    blocks: list[Block] = []
    for message in [*shown["messages"], *([said] if said else [])]:
        role = message["role"]
        if role in ("user", "tool"):
            blocks.append(("result" if role == "tool" else role, str(message["content"])))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            blocks.append(("call", f"{function['name']} {function['arguments']}"))
    return blocks


def check_traces(langfuse: LangfuseServer, runs: Sequence[Trajectory]) -> None:
    """Langfuse has each run once, and of each call the very messages, tools, node and id."""
    traces = langfuse.traces()
    assert set(traces) == {trace_id(run.id) for run in runs} and not langfuse.duplicates()
    for run in runs:
        root, *spans = traces[trace_id(run.id)]
        assert (root.type, root.metadata["trajectory_id"]) == ("agent", run.id)
        calls = {span.metadata["call_id"]: span for span in spans if span.type == "generation"}
        assert list(calls) == [turn.call_id for turn in run.turns]
        by_id = {span.id: span for span in spans}
        for index, turn in enumerate(run.turns):
            call = calls[turn.call_id]
            shown = json.loads(call.attributes["langfuse.observation.input"])
            assert shown == {"messages": run.prompt(index), "tools": list(turn.tools)}
            assert json.loads(call.attributes["langfuse.observation.output"]) == turn.reply
            assert call.metadata["langgraph_node"] == turn.node == by_id[call.parent].name


def check_step(
    runs: Sequence[Trajectory],
    rewards: Mapping[str, float],
    groups: Sequence[Sequence[str]],
    result: TrainResult,
) -> None:
    """The step's rewards and advantages are those of the person, computed by hand."""
    known = {run.id: run for run in runs}
    assert result.metrics["reward_mean"] == pytest.approx(fmean(rewards.values()))
    tokens: list[int] = []
    advantages: list[float] = []
    for group in groups:
        mean = fmean(rewards[run] for run in group)
        for run in group:
            said = [turn.usage.completion_tokens for turn in known[run].turns if turn.usage]
            tokens.append(sum(said))
            advantages.append(abs(rewards[run] - mean))
    [node] = result.nodes.values()
    by_hand = sum(map(float.__mul__, map(float, tokens), advantages)) / sum(tokens)
    assert (node.tokens, node.excluded) == (sum(tokens), {})
    assert node.advantage_abs == pytest.approx(by_hand)

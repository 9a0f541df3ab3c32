"""The whole loop: an agent's runs, Langfuse, a person who sees only that, and a better agent."""

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
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
from tests.support.langfuse_server.records import Span
from tests.support.live_server import BASE_MODEL, ForkedServer, LiveServer
from tests.support.mails import mails_of
from tests.support.soak import count, in_soak, share

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
        self.seen: list[Trajectory] = []  # by Langfuse
        self.said: dict[str, float] = {}  # by trace

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
            deadline = time.monotonic() + 60
            while Spool(self.spool).count():  # the machine was slow: `review push --spool`
                try:
                    push_spool(self.spool)
                except ConfigError:  # the exporter's own thread is in its last request
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            self.client.post_groups(found.groups)
            self.seen += found.trajectories
        return list(found.trajectories)

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

    def train(self, runs: Sequence[Trajectory]) -> int:
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
        return self.client.wait(job).version


#: `test_langfuse.py` shows the kind of it: captured, exported, reviewed, pulled and trained.
@in_soak
@pytest.mark.soak("R3", DAYS, f"days of {SCENARIOS * SIZE} reviewed runs")
@pytest.mark.slow
def test_what_a_person_says_of_traces_makes_the_agent_better(
    art_server: LiveServer, langfuse: LangfuseServer, tmp_path: Path, client: ArtClient
) -> None:
    loop = Loop(art_server, langfuse, client, tmp_path)
    train, held_out = (loop.mails.scenarios(split) for split in ("train", "test"))
    before = [run.reward or 0.0 for run in loop.roll_out(held_out, 1, seen=False)]
    for day in range(DAYS):
        runs = loop.roll_out(train[SCENARIOS * day : SCENARIOS * (day + 1)], SIZE, seen=True)
        loop.review()
        found = pull(client, root=tmp_path)
        assert (found.kept.new, found.kept.refused) == (len(runs), ())
        assert loop.train(runs) == day + 1
    assert pull(client, root=tmp_path).kept.new == 0
    after = [run.reward or 0.0 for run in loop.roll_out(held_out, 1, seen=False)]
    assert all(client.trajectory(run.id).reward == run.reward for run in loop.seen)
    gained = fmean(after) - fmean(before)
    if share() >= 1:  # of 200 questions each the difference has a standard error of at most 0.05
        assert gained >= 0.1, (before, after)
    print(f"{fmean(before):.3f}, {gained:+.3f} on {HELD_OUT} held-out questions")  # noqa: T201


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

"""Reviewed runs of production train: captured, exported, reviewed in Langfuse, pulled, trained."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import MessagesState

from langchain_art import ArtClient, ChatART, Exporter, Run, capture
from langchain_art.export.ids import trace_id, turn_observation_id
from langchain_art.review.pull import pull
from langchain_art.review.queue import Pushed, queue_runs
from langchain_art.wire import Trajectory
from langchain_art.wire.reviews import Pick
from tests.support.graphs import RETRY, Flaky, Scripted, graph_of, node
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer

SECRET = "api_key=abcdef1234567890"


class Production:
    """An application whose runs are exported, as the page of the traces shows it."""

    def __init__(self, server: LiveServer, spool: Path) -> None:
        self.policy, self.url, self.spool = server.policy, server.base_url, spool

    def model(self) -> ChatART:
        return ChatART(model=self.policy, base_url=self.url, max_tokens=4, temperature=1.0)

    def answer(self, *graphs: Any, rewards: Sequence[float] = ()) -> list[Run]:
        """One run of each graph, on a question that has a secret in it."""
        runs: list[Run] = []
        asked = {"messages": [("user", f"Can I have my money back? {SECRET}")]}
        with Exporter(spool=self.spool, name="shop") as exporter:
            for graph, reward in zip_longest(graphs, rewards):
                with capture(export=exporter, scenario="refund") as run:
                    graph.invoke(asked)
                    run.reward = reward
                runs.append(run)
        return runs


@pytest.fixture
def production(
    art_server: LiveServer, own_policy: str, langfuse: LangfuseServer, tmp_path: Path
) -> Production:
    return Production(art_server, tmp_path / "spool")


def told(run: Run | Trajectory) -> list[Any]:
    """What is trained of a run, and what is shown of it."""
    whole = run.trajectory() if isinstance(run, Run) else run
    return [
        (turn.call_id, turn.excluded_because, turn.ours, turn.path, turn.model, turn.reply, prompt)
        for index, turn in enumerate(whole.turns)
        if turn.call_id is not None and (prompt := whole.prompt(index))
    ]


def test_reviewed_runs_of_production_are_trained_on_their_recorded_tokens(
    production: Production, langfuse: LangfuseServer, tmp_path: Path, client: ArtClient
) -> None:
    graph = graph_of(writer=node(production.model())).compile()
    runs = production.answer(graph, graph)
    for value, run in enumerate(runs):
        langfuse.annotate(trace_id(run.id), "human_reward", float(value))
    assert pull(client, root=tmp_path).kept.new == 2
    for run in runs:
        assert told(client.trajectory(run.id)) == told(run)
    planned = client.plan_reviews(production.policy)
    assert planned.counted("reward") == {"trains": 2}
    assert set(planned.groups[0]) == {run.id for run in runs}
    [job] = client.train_reviews(production.policy)
    done = client.wait(job)
    sampled = [turn.usage.completion_tokens for run in runs for turn in run.turns if turn.usage]
    assert (done.version, done.excluded) == (1, {})
    assert sum(node.tokens for node in done.nodes.values()) == sum(sampled)
    assert pull(client, root=tmp_path).kept.unchanged == 2


def test_what_the_graph_threw_away_is_not_trained_and_secrets_are_back_in_their_prompts(
    production: Production, langfuse: LangfuseServer, tmp_path: Path, client: ArtClient
) -> None:
    model = production.model()

    def chooser(state: MessagesState) -> Any:
        _, second = model.invoke(state["messages"]), model.invoke(state["messages"])
        return {"messages": [second]}

    graph = graph_of(drafter=node(Scripted(lines=["Well."])), chooser=chooser)
    graph.add_node("writer", Flaky(node(model)), retry_policy=RETRY)
    graph.add_edge("chooser", "writer")
    [run] = production.answer(graph.compile())
    assert sorted(str(turn.excluded_because) for turn in run.turns) == [
        *("None", "None", "None", "retried", "retried", "unchosen")
    ]
    call = run.turns[-1]
    observation = turn_observation_id(run.id, call, len(run.turns) - 1)
    langfuse.annotate(trace_id(run.id), "human_reward", 1.0, observation_id=observation)
    assert SECRET not in str([span.attributes for span in langfuse.spans])
    assert pull(client, root=tmp_path).kept.new == 1
    kept = client.trajectory(run.id)
    assert told(kept) == told(run) and kept.scenario == "refund"
    assert len(kept.turns) == len(run.turns)  # the other model's reply is shown, too
    [said] = client.reviews(run=run.id)
    assert said.call_id == call.call_id


def test_a_run_whose_calls_are_another_runs_is_assembled_by_their_ids(
    production: Production, langfuse: LangfuseServer, tmp_path: Path, client: ArtClient
) -> None:
    """A scope within a scope: the server has tagged the calls with the inner run's id."""
    inner = graph_of(writer=node(production.model())).compile()

    def within(state: MessagesState) -> Any:
        with capture():
            return inner.invoke(state)

    [run] = production.answer(graph_of(outer=within).compile())
    langfuse.annotate(trace_id(run.id), "human_reward", 1.0)
    assert pull(client, root=tmp_path).kept.new == 1
    assert told(client.trajectory(run.id)) == told(run)


def test_runs_of_production_are_queued_for_review(
    production: Production, langfuse: LangfuseServer, tmp_path: Path, client: ArtClient
) -> None:
    graph = graph_of(writer=node(production.model())).compile()
    runs = production.answer(graph, graph)
    hosted = graph_of(writer=node(Scripted(lines=["No."]))).compile()
    production.answer(hosted)  # of no policy of the server: nothing to train

    def queued(pick: Pick) -> Pushed:
        return queue_runs(client, pick, policy=production.policy)

    assert queued("lowest").left_out == {"not_ordered": 2}
    assert set(queued("random").queued) == {run.id for run in runs}
    assert queued("random").left_out == {"queued": 2}
    for run in runs:
        langfuse.annotate(trace_id(run.id), "human_reward", 1.0)
    pull(client, root=tmp_path)
    assert queued("random").left_out == {"reviewed": 2}

    runs = production.answer(graph, graph, graph, rewards=(0.5, 0.0, 1.0))
    assert queued("lowest").queued == (runs[1].id, runs[0].id, runs[2].id)

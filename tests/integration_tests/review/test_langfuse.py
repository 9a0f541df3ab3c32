"""Reviews by way of Langfuse: runs go into a queue once; what people say comes back once.

Nothing of it is lost, and what they take back is not trained. Runs of production are captured,
exported, reviewed, pulled and trained.
"""

import json
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import MessagesState

from langchain_art import ArtClient, ChatART, Exporter, Run, capture
from langchain_art.errors import ArtError, ConfigError, ServerUnreachable
from langchain_art.export.ids import trace_id, turn_observation_id
from langchain_art.review.pull import OVERLAP, pull
from langchain_art.review.queue import Pushed, queue_runs
from langchain_art.review.report import calibrate_judge, review_report
from langchain_art.review.scores import Reading
from langchain_art.traces.from_langfuse import read_langfuse
from langchain_art.wire import Review, ReviewTraining, Trajectory
from langchain_art.wire.reviews import Pick
from tests.support.exported_runs import export
from tests.support.graphs import RETRY, Flaky, Scripted, graph_of, node
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer
from tests.support.reviewed_runs import Command, MakeRuns, human_reward


def test_scores_come_back_as_rewards_and_corrections(
    langfuse: LangfuseServer,
    art_server: LiveServer,
    make_runs: MakeRuns,
    tmp_path: Path,
    review: Command,
    monkeypatch: pytest.MonkeyPatch,
    client: ArtClient,
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    first, second = make_runs(2)
    lost = Trajectory(id="of-another-server")
    where = export(langfuse, [first, second, lost])
    langfuse.spans += langfuse.spans[:2]  # sent again, and not merged yet
    (trace, [call]), (other, _) = where[first.id], where[second.id]
    reward = langfuse.annotate(trace, "human_reward", 1.0, author="ann", comment="good")
    langfuse.annotate(other, "human_reward", 0.0, author="bob")
    langfuse.annotate(trace, "output", "In May.", observation_id=call, data_type="CORRECTION")
    langfuse.annotate(trace, "human_reward", True, observation_id=call, data_type="BOOLEAN")
    langfuse.annotate(where[lost.id][0], "human_reward", 1.0)
    langfuse.annotate("0" * 32, "human_reward", 1.0)
    langfuse.annotate(trace, "verdict", "good", data_type="CATEGORICAL")
    langfuse.annotate(other, "human_reward", 1.0, author=None)  # prefilled by a program

    def said(*options: str) -> str:
        return review("pull", "--root", str(tmp_path), *options)

    def pulled(*options: str) -> dict[str, Any]:
        return json.loads(said("--json", *options))

    found = pulled()
    assert (found["read"], found["new"], found["since"]) == (8, 4, None)
    assert [one["reason"] for one in found["refused"]] == ["unknown_trajectory"]
    assert found["left_out"] == {"no_trace": 1, "unmapped": 1, "prefilled": 1}
    assert found["unmapped_labels"] == ["good"]
    kept = {(one.kind, one.call_id): one for one in client.reviews(run=first.id)}
    call_id = first.turns[0].call_id
    assert kept["reward", None].value == 1.0
    assert (kept["reward", None].reviewer, kept["reward", None].comment) == ("ann", "good")
    assert kept["reward", call_id].value == 1.0
    corrected = {"role": "assistant", "content": "In May."}
    assert kept["correction", call_id].correction == corrected
    [one] = client.reviews(run=second.id)
    assert (one.value, one.reviewer) == (0.0, "bob")

    langfuse.annotate(trace, "human_reward", 0.25, author="ann", score_id=reward)
    again = pulled("--value", "good=1")
    assert (again["revised"], again["unchanged"], again["new"]) == (1, 3, 1)
    assert again["since"] is not None
    assert {one.id: one.value for one in client.reviews(run=first.id)}[reward] == 0.25
    words = said()
    assert "8 scores read of" in words
    assert "unmapped: its label has no value; give it one with --value LABEL=NUMBER (good)" in words
    assert "refused: 1 of runs that this server does not have" in words


def test_the_next_pull_reads_what_is_new_and_what_may_have_come_late(
    langfuse: LangfuseServer, make_runs: MakeRuns, tmp_path: Path, client: ArtClient
) -> None:
    runs = make_runs(3)
    traces = [trace for trace, _ in export(langfuse, runs).values()]
    now, days = time.time(), OVERLAP.total_seconds()
    old = langfuse.annotate(traces[0], "human_reward", 1.0, at=now - 3 * days)
    langfuse.annotate(traces[1], "human_reward", 1.0, at=now)
    assert pull(client, root=tmp_path).kept.new == 2
    late = langfuse.annotate(traces[2], "human_reward", 1.0, at=now - days / 2)
    langfuse.annotate(traces[0], "human_reward", 0.0, score_id=old)  # before the overlap
    found = pull(client, root=str(tmp_path))
    assert (found.read, found.kept.new, found.kept.unchanged) == (2, 1, 1)
    assert [one.id for one in client.reviews(run=runs[2])] == [late]

    # Which run a trace shows is said by its root: the other observations are read only where
    # the server does not have the run.
    asked = [one for one in langfuse.requests if one.path.endswith("/v2/observations")]
    assert asked and all("isRootObservation" in one.query["filter"][0] for one in asked)

    found = pull(client, root=tmp_path, everything=True)
    assert (found.read, found.kept.revised, found.since) == (3, 1, None)

    [note] = (tmp_path / "reviews").iterdir()
    note.write_text("{}")
    with pytest.raises(ConfigError, match="Delete it"):
        pull(client, root=tmp_path)


def test_what_is_a_persons_score_is_the_same_wherever_it_is_read(
    langfuse: LangfuseServer, make_runs: MakeRuns, tmp_path: Path, client: ArtClient
) -> None:
    saved, prefilled, corrected, sent, none = runs = make_runs(5)
    trace = {run: where[0] for run, where in export(langfuse, runs).items()}
    langfuse.annotate(trace[saved.id], "human_reward", 0.75)
    for run in (prefilled, corrected):
        langfuse.annotate(trace[run.id], "human_reward", 1.0, author=None, score_id=f"p-{run.id}")
    langfuse.annotate(trace[corrected.id], "human_reward", 0.0, score_id=f"p-{corrected.id}")
    score = {"name": "human_reward", "value": 1, "traceId": trace[sent.id]}
    httpx.post(f"{langfuse.url}/api/public/scores", auth=langfuse.keys, json=[score])
    expected = {saved.id: 0.75, prefilled.id: None, corrected.id: 0.0, sent.id: None, none.id: None}
    pull(client, root=tmp_path)
    said = {run.id: [one.value for one in client.reviews(run=run)] for run in runs}
    assert said == {run: [] if value is None else [value] for run, value in expected.items()}
    assert {trace.run: trace.score for trace in read_langfuse().traces} == expected


def test_a_langfuse_that_fails_is_named_and_nothing_is_noted(
    langfuse: LangfuseServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: ArtClient
) -> None:
    langfuse.annotate("t", "human_reward", 1.0)
    monkeypatch.setattr("langfuse.api.core.http_client._retry_timeout", lambda **_: 0.0)
    expected: list[tuple[Any, type[ArtError], str]] = [
        ("401", ConfigError, "refuses the keys"),
        ("500", ServerUnreachable, "answers 500 to read scores"),
        ("refused", ServerUnreachable, "gave no answer"),
    ]
    for fault, error, words in expected:
        langfuse.fault = fault
        with pytest.raises(error, match=words):
            pull(client, root=tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(ConfigError, match="no LANGFUSE_SECRET_KEY"):
        pull(client, root=tmp_path)


def test_a_review_that_is_deleted_in_langfuse_is_not_trained(
    client: ArtClient,
    own_policy: str,
    make_runs: MakeRuns,
    review: Command,
    langfuse: LangfuseServer,
    tmp_path: Path,
) -> None:
    where = export(langfuse, runs := make_runs(4))
    scores = [
        langfuse.annotate(where[run.id][0], "human_reward", float(i % 2))
        for i, run in enumerate(runs)
    ]
    assert pull(client, root=tmp_path).kept.new == 4
    for one in scores[:2]:
        del langfuse.scores[one]
    pull(client, root=tmp_path, everything=True)
    told = review("train", own_policy)
    assert "2 runs and 0 single calls of 1 scenarios are trained on" in told
    assert "2 rewards: were taken back" in told

    # Deleted after it was trained: said, with the version that saw it; nothing is trained again.
    del langfuse.scores[scores[2]]
    told = review("pull", "--root", str(tmp_path), "--all")
    assert "taken back: 1 whose score Langfuse has no more" in told
    assert f"taken back after it was trained, by {own_policy}@1: {scores[2]}" in told
    assert f"3 rewards: were taken back ({own_policy}@1)" in review("train", own_policy)
    assert client.policy(own_policy).version == 1
    assert "taken back" not in review("pull", "--root", str(tmp_path), "--all")


def test_only_what_was_deleted_is_taken_back(
    client: ArtClient, make_runs: MakeRuns, langfuse: LangfuseServer, tmp_path: Path
) -> None:
    runs = make_runs(4)
    where = export(langfuse, runs)
    trace, [call] = where[runs[0].id]
    correction: Any = {"observation_id": call, "data_type": "CORRECTION"}
    corrected = langfuse.annotate(trace, "output", "In May.", **correction)
    given = langfuse.annotate(where[runs[1].id][0], "human_reward", "good", data_type="CATEGORICAL")
    lost = langfuse.annotate(where[runs[2].id][0], "human_reward", 1.0)
    sent = {"name": "user_feedback", "value": 1, "traceId": where[runs[3].id][0]}
    httpx.post(f"{langfuse.url}/api/public/scores", auth=langfuse.keys, json=[sent])
    assert pull(client, Reading(values={"good": 1.0}), root=tmp_path).kept.new == 3
    feedback = pull(client, Reading("user_feedback", "API"), root=tmp_path)
    assert (feedback.read, feedback.kept.new) == (1, 1)
    assert feedback.since is None  # what people gave is noted apart
    assert client.reviews(run=runs[3])[0].value == 1.0
    # Another project's: its trace is not in this one.
    [other] = make_runs(1)
    client.put_reviews([human_reward(other, 1.0, source="langfuse", id="elsewhere")])

    # A label without a value today, another source, another project: none of it was deleted.
    found = pull(client, root=tmp_path, everything=True)
    assert (found.gone, found.left_out) == ((), {"unmapped": 1})
    assert pull(client, Reading("user_feedback", "API"), root=tmp_path, everything=True).gone == ()

    # Another label since, which has no value: what was said before does not hold any more.
    labels = Reading(values={"good": 1.0})
    for label, holds in (("awful", False), ("good", True)):
        about: Any = {"data_type": "CATEGORICAL", "score_id": given}
        langfuse.annotate(where[runs[1].id][0], "human_reward", label, **about)
        for revised in (1, 0):
            assert pull(client, labels, root=tmp_path).kept.revised == revised
        assert client.reviews(run=runs[1])[0].taken_back is not holds

    langfuse.annotate(trace, "output", "", score_id=corrected, **correction)  # emptied
    langfuse.spans = [one for one in langfuse.spans if one.trace_id != where[runs[2].id][0]]
    del (
        langfuse.scores[given],
        langfuse.scores[lost],
    )  # the trace of the latter is gone, too: retention, maybe
    found = pull(client, root=tmp_path, everything=True)
    assert set(found.gone) == {corrected, given}
    [kept] = client.reviews(run=runs[0])
    assert kept.taken_back and kept.deleted and kept.kind == "correction"
    assert not client.reviews(run=runs[2])[0].taken_back
    langfuse.annotate(trace, "output", "In June.", score_id=corrected, **correction)
    assert pull(client, root=tmp_path).kept.revised == 1
    assert not client.reviews(run=runs[0])[0].taken_back


def test_a_queue_is_filled_reviewed_and_reported(
    langfuse: LangfuseServer,
    own_policy: str,
    make_runs: MakeRuns,
    tmp_path: Path,
    review: Command,
    client: ArtClient,
) -> None:
    runs = make_runs(5)
    export(langfuse, runs[:4])
    for reward, run in enumerate(runs):
        client.reward(run, reward / 4)
    first = queue_runs(client, "lowest", 2)
    assert first.queued == (runs[0].id, runs[1].id)
    [config] = langfuse.configs.values()
    [queue] = langfuse.queues.values()
    assert (config["name"], config["minValue"], config["maxValue"]) == ("human_reward", 0, 1)
    assert queue["scoreConfigIds"] == [config["id"]]
    for item in list(langfuse.items.values()):
        value = 0.0 if item["objectId"] == trace_id(runs[0].id) else 1.0
        langfuse.annotate(item["objectId"], "human_reward", value, queue=queue["id"])
    assert pull(client, root=tmp_path).kept.new == 2

    second = queue_runs(client, "lowest", 10)
    assert second.queued == (runs[2].id, runs[3].id)
    # The server may have reviewed runs of other tests.
    assert second.left_out["reviewed"] >= 2 and second.left_out["no_trace"] >= 1
    third = queue_runs(client, "lowest", 10)
    assert third.queued == () and third.left_out["queued"] == 2
    assert len(langfuse.items) == 4 and len(langfuse.queues) == len(langfuse.configs) == 1
    with pytest.raises(ConfigError, match="does not ask for this score"):
        queue_runs(client, "random", name="another")
    assert queue_runs(client, "random", policy="nobody").queued == ()

    told = " ".join(review("report", own_policy).split())
    assert "2 reviews: 2 runs and calls have the score 'human_reward'" in told
    assert "ruler" in told and "reward: ranks runs as people do, beyond chance" in told
    told = review("push", "--pick", "random", "--n", "1")
    assert "0 runs are queued in 'langchain-art', by random" in told
    with pytest.raises(ConfigError, match="expected one of them: --pick"):
        review("push")


def test_what_reviewers_disagree_on_goes_to_a_third_and_what_was_taken_back_is_open(
    langfuse: LangfuseServer,
    own_policy: str,
    make_runs: MakeRuns,
    tmp_path: Path,
    client: ArtClient,
) -> None:
    runs = make_runs(5)
    export(langfuse, runs)
    agreed, disputed, single, back, fresh = runs

    def queued(queue: str) -> tuple[str, ...]:
        return queue_runs(client, "random", policy=own_policy, queue=queue).queued

    assert set(queued("ann's")) == set(queued("bob's")) == {run.id for run in runs}
    for run, said in ((agreed, (1.0, 1.0)), (disputed, (1.0, 0.0)), (single, (0.0,))):
        for who, value in zip(("ann", "bob"), said, strict=False):
            langfuse.annotate(trace_id(run.id), "human_reward", value, author=who)
    assert client.put_reviews([human_reward(back, None, reviewer="ann")]).new == 1
    pull(client, root=tmp_path)
    third = queued("third")
    assert third[0] == disputed.id and set(third[1:]) == {back.id, fresh.id}


def test_it_is_trained_where_people_agree_and_asked_where_not(
    own_policy: str, make_runs: MakeRuns, review: Command, client: ArtClient, http: httpx.Client
) -> None:
    policy = own_policy

    def said(run: Trajectory, value: float | None, at: float = 1.0) -> Review:
        return human_reward(run, value, at, reviewer="ann")

    runs = make_runs(12)  # ruler says 0, 0.1, ... 1.1
    for run in runs[:5]:  # of the lower half people think the same
        client.put_reviews([said(run, 0.0)])
    for number, run in enumerate(runs[6:10]):  # of the upper one half of them do
        client.put_reviews([said(run, number % 2)])
    with pytest.raises(ConfigError, match=r"expected one that runs have: \['ruler'\]"):
        calibrate_judge(client, "tone", policy)
    asked = ("calibrate", "ruler", "--policy", policy, "--bands", "2")
    told = review(*asked)
    assert "0.57 to 1.00" in told and "trained" in told and "3 runs" not in told
    assert "2 runs wait for people" in told
    assert {one.source for one in client.reviews(policy=policy)} == {"page"}

    told = review(*asked, "--keep")
    assert "1 scores of ruler count as verdicts, 0 were taken back" in told
    [kept] = [one for one in client.reviews(policy=policy) if one.source == "judge"]
    assert (kept.trajectory, kept.value, kept.reviewer) == (runs[5].id, 0.5, "ruler")
    queue = f"/page/review-queue?pick=random&policy={policy}"
    for name in ("", "&reviewer=bob"):
        listed = {one["id"] for one in http.get(queue + name).json()["runs"]}
        assert runs[5].id not in listed and {runs[10].id, runs[11].id} <= listed
    plan = client.plan_reviews(ReviewTraining(policy=policy))
    assert plan.rewards[runs[5].id] == 0.5 and len(plan.rewards) == 10
    # A judge is no person: it is not compared with itself, and gives way to one.
    assert len(review_report(client, policy).verdicts.all) == 9
    client.put_reviews([said(runs[5], 1.0)])
    plan = client.plan_reviews(ReviewTraining(policy=policy))
    assert plan.rewards[runs[5].id] == 1.0

    # Once people agree too little, what was kept is taken back.
    client.put_reviews([said(runs[5], None, at=2.0)])
    assert client.plan_reviews(ReviewTraining(policy=policy)).rewards[runs[5].id] == 0.5
    client.put_reviews([said(run, 1.0, at=3.0) for run in runs[:4]])
    found = calibrate_judge(client, "ruler", policy, count=2, keep=True)
    assert (found.kept, found.taken_back) == (0, 1)
    assert runs[5].id not in client.plan_reviews(ReviewTraining(policy=policy)).rewards
    again = calibrate_judge(client, "ruler", policy, count=2, keep=True)
    assert (again.kept, again.taken_back) == (0, 0)


SECRET = "api_key=abcdef1234567890"


class Production:
    """An application whose runs are exported, as the page of the traces shows it."""

    def __init__(self, server: LiveServer, spool: Path) -> None:
        self.policy, self.spool = server.policy, spool
        self.model = ChatART(model=server.policy, base_url=server.base_url, max_tokens=4)
        self.graph = graph_of(writer=node(self.model)).compile()

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
    graph = production.graph
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
    model = production.model

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

    def within(state: MessagesState) -> Any:
        with capture():
            return production.graph.invoke(state)

    [run] = production.answer(graph_of(outer=within).compile())
    langfuse.annotate(trace_id(run.id), "human_reward", 1.0)
    assert pull(client, root=tmp_path).kept.new == 1
    assert told(client.trajectory(run.id)) == told(run)


def test_runs_of_production_are_queued_for_review(
    production: Production, langfuse: LangfuseServer, tmp_path: Path, client: ArtClient
) -> None:
    graph = production.graph
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

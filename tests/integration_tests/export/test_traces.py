"""What Langfuse has of a fit, of its evaluations and of production: every run, once and whole."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.callbacks import CallbackManager
from langchain_core.tracers import LangChainTracer
from langsmith import tracing_context
from typer.testing import CliRunner

from langchain_art import ArtClient, Exporter, capture, gather_sync
from langchain_art.cli.main import app
from langchain_art.export import ids
from langchain_art.wire.trajectories import EVALUATION
from tests.support.chat_models import model_of
from tests.support.graphs import ASK, Scripted, graph_of, node
from tests.support.langfuse_server import LangfuseServer
from tests.support.langsmith_settings import langsmith_settings
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import said, trainer_of


async def test_every_run_of_a_fit_is_one_trace_with_its_scores(
    art_server: LiveServer,
    langfuse: LangfuseServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = new_id("traced")
    graph = graph_of(writer=node(model_of(art_server, policy, max_tokens=4))).compile()
    times = Counter[str]()

    async def rollout(scenario: str) -> float:
        await graph.ainvoke(ASK)
        times[scenario] += 1
        return float(times[scenario] % 2)  # a group's two runs differ

    exporter = Exporter(spool=tmp_path / "spool", tags=["demo"])
    small = {"group_size": 2, "name": "mail", "export": exporter, "out_dir": None}
    trainer = trainer_of(art_server, tmp_path, policy, **small)
    trainer.out_dir = tmp_path / "mail"
    fitted = await trainer.fit(rollout, ["a", "b", "c"], steps=1, eval_scenarios=["d", "e"])
    assert "Langfuse: 8 runs sent." in said(trainer)

    traces = langfuse.traces()
    assert len(traces) == 8 and not langfuse.duplicates()
    with ArtClient(art_server.base_url) as client:
        known = client.trajectories(100)  # the server is other tests', too
        runs = [one for one in known if any((t.model or "").startswith(policy) for t in one.turns)]
        assert len(runs) == 8
        audits = {run.id: client.audit(run.id) for run in runs}
    scores = {(one.subject["id"], one.name): one.value for one in langfuse.scores.values()}
    for run in runs:
        trace = ids.trace_id(run.id)
        root, *spans = traces[trace]
        (called,) = [span for span in spans if span.type == "generation"]
        assert [span.type for span in spans] == ["span", "generation"]
        assert (root.type, root.name, root.metadata["trajectory_id"]) == ("agent", policy, run.id)
        assert called.name == "writer" and called.parent == spans[0].id
        assert called.metadata["call_id"] == run.turns[0].call_id
        assert called.id == ids.call_observation_id(run.id, run.turns[0].call_id or "")
        assert called.told("model.name") == run.turns[0].model
        assert json.loads(called.attributes["langfuse.observation.input"]) == run.prompt(0)
        assert json.loads(called.attributes["langfuse.observation.output"]) == run.turns[0].reply
        assert root.start <= called.start <= called.end <= root.end
        assert scores[trace, "reward"] == run.reward
        trained = EVALUATION not in run.metadata
        assert root.environment == ("train" if trained else "eval")
        assert root.attributes["langfuse.trace.tags"][:2] == ["demo", "fit:mail"]
        if trained:
            assert scores[trace, "trained_tokens"] == audits[run.id].sampled_tokens
            assert "excluded_because" not in called.metadata
    sessions = Counter(root.attributes["session.id"] for root, *_ in traces.values())
    assert sorted(sessions.values()) == [1, 1, 1, 1, 2, 2]  # a group's siblings in one

    found = [root.attributes for root, *_ in traces.values() if root.environment == "eval"]
    names = {one["langfuse.experiment.id"]: one["langfuse.experiment.name"] for one in found}
    assert len(names) == 2 and sorted(names.values()) == [
        f"{policy}@0 after step 0 (mail)",
        f"{policy}@1 after step 1 (mail)",
    ]
    items = Counter(one["langfuse.experiment.item.id"] for one in found)
    assert sorted(items.values()) == [2, 2]
    assert fitted.before is not None
    assert fitted.before.mean in [v for (id_, n), v in scores.items() if n == "reward_mean"]

    sent = len(langfuse.spans)
    with Exporter(spool=tmp_path / "again", name="other") as again:
        for run in runs:
            again.add(run)
    assert len(langfuse.spans) == sent  # else they would be of production, in no session
    assert "was exported by its fit" in caplog.text


def test_production_is_sent_without_a_trainer(
    art_server: LiveServer, langfuse: LangfuseServer, tmp_path: Path
) -> None:
    graph = graph_of(writer=node(model_of(art_server, "base_model", max_tokens=4))).compile()
    with Exporter(spool=tmp_path / "spool", name="mail") as exporter:
        with pytest.raises(ZeroDivisionError), capture(export=exporter) as failed:
            _ = 1 / 0
        with capture(export=exporter, metadata={"api_key": "abcdef123456"}) as run:
            graph.invoke(ASK)
    assert set(langfuse.traces()) == {ids.trace_id(failed.id), ids.trace_id(run.id)}
    root = langfuse.traces()[ids.trace_id(failed.id)][0]
    assert root.attributes["langfuse.observation.level"] == "ERROR"
    assert "ZeroDivisionError" in root.attributes["langfuse.observation.status_message"]
    whole = langfuse.traces()[ids.trace_id(run.id)][0]
    assert whole.environment == "production" and whole.metadata["api_key"] == "[redacted]"
    assert not list((tmp_path / "spool").glob("*.runs"))


def test_scores_that_an_old_server_refuses_wait_for_a_newer_one(
    langfuse: LangfuseServer, tmp_path: Path
) -> None:
    langfuse.version = "4.16.0"
    with capture() as run:
        graph_of(writer=node(Scripted(lines=["Monday"]))).compile().invoke(ASK)
        run.reward = 1.0
    exporter = Exporter(spool=tmp_path / "spool")
    exporter.add(run)
    outcome = exporter.close()
    assert outcome is not None and (outcome.sent, outcome.left) == (0, 1)
    assert "4.59 or later" in str(outcome.trouble) and len(langfuse.traces()) == 1
    langfuse.version = "4.59.0"
    done = CliRunner().invoke(app, ["review", "push", "--spool", str(tmp_path / "spool")])
    assert "1 run sent" in done.output and not langfuse.duplicates()
    assert [score.name for score in langfuse.scores.values()] == ["reward"]


@pytest.fixture
def langsmith() -> Iterator[None]:
    """A program whose environment says that all of it is traced."""
    nobody = "http://127.0.0.1:1"
    with langsmith_settings(TRACING="true", API_KEY="none", ENDPOINT=nobody):
        yield


def is_traced() -> bool:
    """Whether what is run here gets LangSmith's tracer."""
    handlers = CallbackManager.configure().handlers
    return any(isinstance(one, LangChainTracer) for one in handlers)


@pytest.mark.usefixtures("langsmith")
def test_rollouts_are_not_sent_to_langsmith_unless_they_ask() -> None:
    assert is_traced()

    def rollout(scenario: str) -> float:
        if scenario == "asks":
            with tracing_context(enabled=True):
                return float(is_traced())
        return float(is_traced())

    found = gather_sync(rollout, ["asks", "does not"], group_size=1)
    assert [run.reward for run in found.trajectories] == [1.0, 0.0]
    assert is_traced()

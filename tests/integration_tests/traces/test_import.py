"""Production traces become what can still be learned from them, and nothing is dropped unsaid."""

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langfuse.langchain import CallbackHandler

from langchain_art.cli.load_rollout import load_scenarios
from langchain_art.cli.main import app
from langchain_art.client.conversations import read_conversations
from langchain_art.client.sync_client import ArtClient
from langchain_art.export.brief import brief
from langchain_art.export.stored_messages import reply_of
from langchain_art.traces.from_jsonl import read_file
from langchain_art.traces.from_langfuse import read_langfuse
from langchain_art.traces.importing import import_traces
from langchain_art.traces.stored import Read, StoredTrace
from langchain_art.wire import Trajectory, TrajectoryGroup, Turn
from langchain_art.wire.identifiers import scenario_id
from langchain_art.wire.redaction import REDACTED
from tests.support.exported_runs import export
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer
from tests.support.reviewed_runs import MakeRuns
from tests.support.steps_of_a_fit import new_id, ok

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "When?"}]


def called(server: LiveServer, run: str = "") -> dict[str, Any]:
    """The reply to a call, tagged with a run's id if one is given."""
    body: dict[str, Any] = {"model": server.policy, "messages": ASKED, "max_tokens": 3}
    body |= {"art": {"trajectory_id": run}} if run else {}
    with server.http() as http:
        return ok(http.post("/v1/chat/completions", json=body))


def hosted(server: LangfuseServer, questions: list[str]) -> list[str]:
    """Runs of a graph on another model, traced by Langfuse's own handler; their traces' ids."""
    client = server.client()
    called = AIMessage("", tool_calls=[{"name": "find", "args": {"q": "x"}, "id": "c-1"}])
    found: list[str] = []
    for question in questions:
        model: Any = FakeMessagesListChatModel(responses=[called]).bind(tools=[TOOL])
        agent = RunnableLambda(lambda asked, model=model: model.invoke([HumanMessage(asked["q"])]))
        handler = CallbackHandler(public_key=server.keys[0])
        agent.invoke({"q": question}, {"callbacks": [handler], "run_name": "mail agent"})
        assert handler.last_trace_id is not None
        found.append(handler.last_trace_id)
    client.flush()
    return found


def test_what_was_cut_or_redacted_on_its_way_is_not_learned(
    art_server: LiveServer, tmp_path: Path
) -> None:
    def trace(name: str, asked: Any, answer: str = "In May.") -> StoredTrace:
        call = Turn(messages=tuple(ASKED), reply=reply_of(answer), ours=False)
        return StoredTrace(id=name, input=asked, output=answer, calls=[call], score=1.0)

    read = Read(
        [
            trace("whole", "When is it … (roughly)?"),
            trace("long", brief("x" * 9000)),
            trace("many", brief(list(range(60)))),
            trace("deep", brief([[[[[[[[["x"]]]]]]]]])),
            trace("secret", f"My key is {REDACTED}", f"It is {REDACTED}"),
        ]
    )
    with ArtClient(art_server.base_url) as client:
        found = import_traces(client, read, tmp_path, store="file")
    assert [one["id"] for one in lines(tmp_path / "scenarios.jsonl")] == [
        scenario_id({"input": "When is it … (roughly)?"})
    ]
    assert found.left_out["scenarios.jsonl"] == {"cut": 3, "redacted": 1}
    assert found.left_out["conversations.jsonl"] == {"redacted": 1}
    assert found.written["conversations.jsonl"] == 4


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_scored_line_that_is_there_twice_is_rated_once(
    art_server: LiveServer, tmp_path: Path
) -> None:
    line = {"messages": [*ASKED, {"role": "assistant", "content": "In May."}], "score": 1.0}
    rated = [line, line, line | {"id": 7, "scenario": 7}, line | {"id": 7, "scenario": "q" * 300}]
    path = tmp_path / "rated.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rated), encoding="utf-8")
    with ArtClient(art_server.base_url) as client:
        found = import_traces(client, read_file(path), tmp_path / "out", store="file")
    rated = lines(tmp_path / "out" / "calibration.jsonl")
    read = [TrajectoryGroup.model_validate(one) for one in rated]
    assert [len(group.trajectories) for group in read] == [1, 1, 1]
    assert found.left_out["calibration.jsonl"] == {"same_run": 1}
    assert found.foreign == 4 and found.written["conversations.jsonl"] == 4


@pytest.mark.parametrize(
    ("behind", "name"), [(0, "runs.jsonl"), (-1, "conversations.jsonl")], ids=["exact", "stale"]
)
def test_a_run_that_several_traces_show_is_imitated_once(
    art_server: LiveServer, tmp_path: Path, behind: int, name: str
) -> None:
    run, traces = new_id("thread"), list[StoredTrace]()
    for turn in range(2):
        reply = called(art_server, run)
        call = Turn(messages=tuple(ASKED), reply=reply_of("May."), call_id=reply["id"])
        traces.append(StoredTrace(id=f"{run}-{turn}", input="When?", calls=[call], score=1.0))
    with ArtClient(art_server.base_url) as client:
        import_traces(client, Read(traces), tmp_path, store="file")  # the server has it now
        found = import_traces(client, Read(traces), tmp_path, store="file", max_staleness=behind)
        assert lines(tmp_path / name) == [run]
        assert found.left_out[name] == {"same_run": 1}
        client.delete_trajectory(run)


def test_traces_are_sorted_by_what_can_be_learned_from_them(
    langfuse: LangfuseServer,
    art_server: LiveServer,
    make_runs: MakeRuns,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    fresh = make_runs(4)
    monkeypatch.setattr(art_server, "policy", new_id("gone"))
    with ArtClient(art_server.base_url) as client:
        client.create_policy(art_server.policy)
        stale = make_runs(1)
        client.delete_policy(art_server.policy)
    where = export(langfuse, [*fresh, *stale])
    good, bad, same, unrated = hosted(langfuse, ["May?", "June?", "May?", "July?"])
    for trace, value in ((where[stale[0].id][0], 1.0), (good, 1.0), (same, 0.9), (bad, 0.0)):
        langfuse.annotate(trace, "human_reward", value)
    for run, value in zip(fresh, (1.0, 0.8, 0.0), strict=False):  # the last one has no score
        langfuse.annotate(where[run.id][0], "human_reward", value)
    langfuse.spans = [one for one in langfuse.spans if one.trace_id != unrated or one.parent]

    def imported() -> dict[str, Any]:
        command = ["traces", "import", "langfuse", "--out", str(tmp_path), "--json"]
        app([*command, "--good", "0.8"], standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    found = imported()
    # The trace whose root is not there is not among those that are listed.
    assert [found[kind] for kind in ("exact", "stale", "foreign", "unreadable")] == [4, 1, 3, 0]
    assert sorted(lines(tmp_path / "runs.jsonl")) == sorted(run.id for run in fresh[:2])
    assert found["left_out"]["runs.jsonl"] == {"scored_low": 1, "not_scored": 1}

    scenarios = load_scenarios(str(tmp_path / "scenarios.jsonl"))
    asked = [one["input"]["q"] for one in scenarios if isinstance(one["input"], dict)]
    assert sorted(asked) == ["June?", "May?"]
    assert found["left_out"]["scenarios.jsonl"] == {"no_input": 1, "same_scenario": 1}

    read = read_conversations(tmp_path / "conversations.jsonl")
    assert found["left_out"]["conversations.jsonl"] == {"scored_low": 1}
    by_id = [one for one in read if isinstance(one, str)]
    assert by_id == [stale[0].id]  # the server has its tokens, whatever became of the policy
    told, again = [one for one in read if isinstance(one, Trajectory)]
    [turn] = told.turns
    assert again.turns == told.turns  # asked, and answered, twice
    assert turn.messages == ({"role": "user", "content": "May?"},) and turn.tools == (TOOL,)
    function = {"name": "find", "arguments": '{"q": "x"}'}
    expected = [{"id": "c-1", "type": "function", "function": function}]
    assert turn.reply is not None and turn.reply["tool_calls"] == expected

    groups = [TrajectoryGroup.model_validate(one) for one in lines(tmp_path / "calibration.jsonl")]
    rated = sorted(run.scores["human"] for group in groups for run in group.trajectories)
    assert rated == [0.0, 0.9, 1.0] and len(groups) == 2  # two runs of one scenario

    for trace in read_langfuse().traces:  # what was exported comes back as it was
        for run in (one for one in fresh if one.id == trace.run):
            assert trace.scenario == run.scenario
            for index, (call, turn) in enumerate(zip(trace.calls, run.turns, strict=True)):
                assert (list(call.messages), call.reply) == (run.prompt(index), turn.reply)
                assert (call.call_id, call.model) == (turn.call_id, turn.model)
                assert (call.node, list(call.tools)) == (turn.node, list(turn.tools))
            fresh = [one for one in fresh if one is not run]
    assert not fresh

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert imported() == found
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_run_that_was_sent_again_is_read_as_it_was_sent_last(
    langfuse: LangfuseServer, make_runs: MakeRuns
) -> None:
    runs = make_runs(2)
    export(langfuse, runs)
    sent = len(langfuse.spans)
    export(langfuse, [run.model_copy(update={"scenario": "later"}) for run in runs])
    assert len(langfuse.spans) == 2 * sent == 2 * len(langfuse.duplicates())
    for _ in range(2):
        assert [trace.scenario for trace in read_langfuse().traces] == ["later"] * 2
        langfuse.merge()
    assert len(langfuse.spans) == sent


@pytest.mark.parametrize("tagged", [True, False])
def test_calls_of_this_server_are_trained_on_as_they_were_sampled_and_fail_as_they_failed(
    art_server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], tagged: bool
) -> None:
    named = new_id("tagged") if tagged else ""
    reply = called(art_server, named)
    answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    line = {"id": new_id("week"), "messages": [*ASKED, answer], "score": 0.5}
    exported = tmp_path / "week.jsonl"
    exported.write_text(json.dumps(line | {"call_id": reply["id"]}) + "\n")
    command = ["traces", "import", str(exported), "--out", str(tmp_path / "out"), "--good", "0.5"]
    for _ in range(2):
        app([*command, "--base-url", art_server.base_url], standalone_mode=False)
    told = capsys.readouterr().out
    assert "1 traces read: 1 exact, 0 stale, 0 of other models, 0 that cannot be read" in told
    [run] = lines(tmp_path / "out" / "runs.jsonl")
    assert run == (named or line["id"])
    with ArtClient(art_server.base_url) as client:
        found = client.audit(run, sft=True)
        assert found.trained_tokens == reply["usage"]["completion_tokens"]
        [said] = client.reviews(run=run)
        assert (said.source, said.value, said.kind) == ("file", 0.5, "reward")
        client.delete_trajectory(run)

        run = new_id("failed")
        reply = called(art_server, run if tagged else "")
        asked, no_answer = tuple(ASKED), reply_of("In May.")
        call = Turn(messages=asked, reply=no_answer, call_id=reply["id"], ours=False)
        trace = StoredTrace(id=run, input="When?", output=None, calls=[call], failed=True)
        import_traces(client, Read([trace]), tmp_path / "failed", store="file")
        assert client.trajectory(run).status == "failed"
        client.delete_trajectory(run)

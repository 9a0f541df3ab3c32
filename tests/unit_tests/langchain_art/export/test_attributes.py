"""Spans that are recorded, and what Langfuse and other backends are given of them."""

import json
import operator
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage
from langfuse import Langfuse
from langfuse._client.attributes import LangfuseOtelSpanAttributes
from langfuse.api import CreateScoreRequest
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send

from langchain_art.export import ids
from langchain_art.export.attributes import gen_ai_message, scores_of
from langchain_art.export.otel_spans import otel_spans
from langchain_art.export.records import Experiment, ExportBatch, SpanRecord
from langchain_art.export.run_spans import recorded_spans, spans_of_turns
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture
from langchain_art.wire import Turn
from langchain_art.wire.redaction import REDACTED, Redactor
from tests.support.graphs import ASK, Flaky, RetryPolicy, Scripted, graph_of, node
from tests.unit_tests.langchain_art.export.examples import PARAMETERS, SECRET, exported

CALLED = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}


def sent(*, langfuse: bool, **labels: Any) -> list[Any]:
    return otel_spans(exported(**labels), Redactor(), langfuse=langfuse)


def test_langfuse_is_given_whole_prompts_with_their_tools_and_no_secret() -> None:
    root, _, first, _, second = sent(langfuse=True)
    assert root.parent is None and root.name == "mail"
    assert f"{root.context.trace_id:032x}" == ids.trace_id("run-1")
    assert f"{first.context.span_id:016x}" == ids.call_observation_id("run-1", "run-1-a")
    told = dict(second.attributes)
    messages = json.loads(told["langfuse.observation.input"])
    assert messages == [
        {"role": "user", "content": f"When? My key is {REDACTED}"},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c", "content": "Monday"},
    ]
    assert json.loads(told["langfuse.observation.output"])["content"] == "On Monday."
    asked = json.loads(first.attributes["langfuse.observation.input"])
    assert asked["messages"] == messages[:1] and asked["tools"][0]["function"]["name"] == "search"
    usage = json.loads(first.attributes["langfuse.observation.usage_details"])
    assert usage == {"input": 7, "output": 2, "total": 9}
    assert json.loads(told["langfuse.observation.metadata.excluded_because"]) == "calls.frozen"
    assert "langfuse.observation.metadata.excluded_because" not in first.attributes
    assert json.loads(first.attributes["langfuse.observation.model.parameters"]) == PARAMETERS
    assert "langfuse.observation.model.parameters" not in told
    answer = json.loads(root.attributes["langfuse.observation.output"])
    assert answer == {"messages": [{"role": "assistant", "content": "On Monday."}]}
    assert not any(SECRET in str(span.attributes) for span in (root, first, second))
    assert "hunter22" not in str(root.attributes)


def test_every_attribute_is_one_that_langfuse_reads() -> None:
    known = {v for k, v in vars(LangfuseOtelSpanAttributes).items() if k.isupper()}
    experiment = Experiment(id="e", name="mail@3")
    for span in sent(langfuse=True, experiment=experiment, tags=("a",), user="ann"):
        for name in span.attributes:
            bare = name.partition(".metadata.")[0] + (".metadata" if ".metadata." in name else "")
            assert bare in known or name.startswith("gen_ai."), name
        assert span.attributes["langfuse.experiment.id"] == "e"
        assert span.attributes["langfuse.version"] == "mail@3"
        assert span.attributes["session.id"] == "fit/step-1/g"


def test_another_backend_is_given_the_conventions_alone() -> None:
    root, _, first, _, second = sent(langfuse=False)
    for span in (root, first, second):
        assert not any(name.startswith("langfuse.") for name in span.attributes)
        assert SECRET not in str(span.attributes)
    assert first.attributes["gen_ai.usage.input_tokens"] == 7
    assert first.attributes["gen_ai.response.model"] == "mail@3"
    assert first.attributes["gen_ai.request.temperature"] == 0.5
    assert list(first.attributes["gen_ai.request.stop_sequences"]) == ["\n"]
    (said,) = json.loads(second.attributes["gen_ai.output.messages"])
    assert said == {"role": "assistant", "parts": [{"type": "text", "content": "On Monday."}]}
    assert len(json.loads(second.attributes["gen_ai.input.messages"])) == 3
    scores = {one.attributes["gen_ai.evaluation.name"]: one.attributes for one in root.events}
    assert scores["ruler"]["gen_ai.evaluation.explanation"] == "short and right"
    assert scores["reward"]["gen_ai.evaluation.score.value"] == 1.0


@pytest.mark.parametrize(
    ("message", "part"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"type": "tool_call", "id": "c", "name": "search", "arguments": "{}"},
        ),
        (
            {"role": "tool", "tool_call_id": "c", "content": "Monday"},
            {"type": "tool_call_response", "id": "c", "response": "Monday"},
        ),
        ({"role": "user", "content": [{"type": "image"}]}, {"type": "image"}),
    ],
)
def test_messages_in_the_shape_of_the_conventions(message: Any, part: Any) -> None:
    assert gen_ai_message(message) == {"role": message["role"], "parts": [part]}


def test_scores_are_those_of_the_sdks_model() -> None:
    batch = ExportBatch(runs=(exported(),), experiments={"e": {"reward_mean": 1.0}})
    found = scores_of(batch, Redactor())
    for one in found:
        CreateScoreRequest.model_validate(one)
    run, call = ids.trace_id("run-1"), ids.call_observation_id("run-1", "run-1-a")
    about = ("name", "value", "comment", "traceId", "observationId", "datasetRunId")
    told = sorted(tuple(one.get(key) for key in about) for one in found)
    assert told == [
        ("reward", 0.25, None, run, call, None),
        ("reward", 1.0, None, run, None, None),
        ("reward_mean", 1.0, None, None, None, "e"),
        ("ruler", 0.9, "short and right", run, None, None),
        ("trained_tokens", 2.0, None, run, None, None),
    ]
    assert len({one["id"] for one in found}) == len(found)
    assert scores_of(batch, Redactor()) == found


def test_a_trace_id_is_the_one_that_langfuses_sdk_computes() -> None:
    assert ids.trace_id("run-17") == Langfuse.create_trace_id(seed="run-17")


def test_every_span_of_a_run_has_an_id_of_its_own() -> None:
    turns = [Turn(call_id="a"), Turn(), Turn()]
    found = [ids.turn_observation_id("run-17", turn, n) for n, turn in enumerate(turns)]
    found += [ids.root_id("run-17"), *(ids.span_id("run-17", n) for n in range(3))]
    assert len(set(found)) == len(found)
    assert all(len(one) == 16 and int(one, 16) for one in found)
    assert found[0] == ids.call_observation_id("run-17", "a")
    assert found[0] != ids.call_observation_id("run-18", "a")


def test_the_url_of_a_trace_needs_no_request() -> None:
    url = ids.trace_url("https://lf.example/", "my project", "run-17")
    assert url == f"https://lf.example/project/my%20project/traces/{ids.trace_id('run-17')}"


def spans_of(graph: Any, given: Any = ASK) -> tuple[SpanRecord, ...]:
    kept: list[Run] = []
    with capture(export=SimpleNamespace(add=kept.append)) as run:
        graph.invoke(given)
    assert kept == [run]
    found = recorded_spans(run)
    assert [span.number for span in found] == list(range(len(found)))
    for span in found:
        assert span.parent is None or span.parent < span.number
        assert span.ended_at is not None and span.started_at <= span.ended_at
    return found


def tree(spans: tuple[SpanRecord, ...]) -> list[tuple[int, str, str]]:
    """Depth, kind and name of each span."""
    depths: list[int] = []
    for span in spans:
        depths.append(0 if span.parent is None else depths[span.parent] + 1)
    return [(d, span.kind, span.name) for d, span in zip(depths, spans, strict=True)]


def test_each_attempt_and_each_branch_is_a_span_of_its_own() -> None:
    flaky = Flaky(node(Scripted(lines=["x"])))
    graph = StateGraph(MessagesState).add_node(
        "writer", flaky, retry_policy=RetryPolicy(initial_interval=0.01, retry_on=ConnectionError)
    )
    spans = spans_of(graph.add_edge(START, "writer").add_edge("writer", END).compile())
    nodes = [span for span in spans if span.kind == "node"]
    assert [(one.attempt, one.outcome) for one in nodes] == [(1, "error"), (2, "error"), (3, "ok")]
    assert nodes[0].error == "ConnectionError: flaky" and nodes[2].error is None

    class Many(MessagesState):
        seen: Annotated[list[str], operator.add]

    fan = StateGraph(Many).add_node("part", lambda state: {"seen": ["p"]})
    fan.add_conditional_edges(START, lambda _: [Send("part", {}), Send("part", {})])
    parts = spans_of(fan.add_edge("part", END).compile(), {"messages": [], "seen": []})
    assert [(one.kind, one.name) for one in parts] == [("node", "part")] * 2
    assert parts[0].namespace != parts[1].namespace and parts[0].output == {"seen": ["p"]}


def test_values_are_kept_only_for_an_export() -> None:
    with capture() as run:
        graph_of(writer=node(Scripted(lines=["a"]))).compile().invoke(ASK)
    assert all(span.input is None and span.output is None for span in run.recorder.spans)


def test_the_turns_alone_tell_nodes_and_calls() -> None:
    inner = graph_of(writer=node(Scripted(lines=["b"]))).compile()
    with capture() as run:
        graph_of(plan=node(Scripted(lines=["a"])), team=inner).compile().invoke(ASK)
    recorded, derived = recorded_spans(run), spans_of_turns(run.turns)
    assert [one[:2] for one in tree(derived)] == [one[:2] for one in tree(recorded)]
    for here, there in zip(recorded, derived, strict=True):
        assert (here.namespace, here.turn, here.path) == (there.namespace, there.turn, there.path)
        assert there.ended_at is not None and there.started_at >= here.started_at - 1e-3


async def test_a_call_that_streams_tells_its_first_token() -> None:
    from langchain_core.language_models import GenericFakeChatModel

    model = GenericFakeChatModel(messages=iter([AIMessage("one two three")]))
    with capture() as run:
        assert len([part async for part in model.astream("hi")]) > 1
    (span,) = recorded_spans(run)
    assert span.first_token_at is not None and span.ended_at is not None
    assert span.started_at <= span.first_token_at <= span.ended_at

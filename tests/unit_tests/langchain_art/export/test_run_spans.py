import operator
from typing import Annotated, Any

from langchain_core.messages import AIMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send

from langchain_art.export.records import SpanRecord
from langchain_art.export.run_spans import recorded_spans, spans_of_turns
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture
from tests.support.graphs import ASK, Flaky, RetryPolicy, Scripted, graph_of, node


class Kept:
    """Exports to a list."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def add(self, run: Run) -> None:
        self.runs.append(run)


def spans_of(graph: Any, given: Any = ASK) -> tuple[SpanRecord, ...]:
    kept = Kept()
    with capture(export=kept) as run:
        graph.invoke(given)
    assert kept.runs == [run]
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

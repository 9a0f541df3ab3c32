"""What the capture handler makes of graphs of every shape, driven by scripted foreign models.

Where a call must reach our server (ids, tags), it does; where only the graph's shape matters, the
model is a fake that says what the test wants.
"""

import math
import operator
import threading
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from langchain_art import CaptureHandler, Trajectory, Turn, capture
from langchain_art.errors import ConfigError
from tests.support.graphs import ASK, Scripted, graph_of, node


def calls(name: str, *ids: str, **args: Any) -> AIMessage:
    return AIMessage(
        "", tool_calls=[{"name": name, "args": args, "id": i, "type": "tool_call"} for i in ids]
    )


@tool
def look(what: str = "") -> str:
    """Look at something."""
    return f"seen {what}"


def lived(run: Any) -> list[Turn]:
    return [turn for turn in run.turns if turn.excluded_because is None]


# ---- the run


def test_a_run_starts_unscored_and_refuses_what_is_no_number() -> None:
    with capture(scenario="q", metadata={"seed": 1}) as run:
        assert run.reward is None
        for bad in (math.nan, math.inf, "many"):
            with pytest.raises(ConfigError, match="reward"):
                run.reward = bad  # type: ignore[assignment]
        run.reward = True
    trajectory = run.trajectory()
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.reward, trajectory.scenario, trajectory.status) == (1.0, "q", "completed")
    assert trajectory.metadata["seed"] == run.metadata["seed"] == 1
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


def test_ids() -> None:
    with capture() as one, capture() as other:
        assert one.id != other.id
        assert len(one.id) == 32
    with pytest.raises(ConfigError, match="trajectory_id"):
        capture(id="no spaces")
    scope = capture(id="mine")
    with scope as run:
        assert run.id == "mine"
    with pytest.raises(ConfigError), scope:
        pass


def test_input_and_output_are_those_of_the_call_whatever_is_appended_to_them() -> None:
    graph = graph_of(a=node(Scripted(lines=["one", "two"]))).compile()
    history: list[Any] = [HumanMessage("hi")]
    with capture() as run:
        history += graph.invoke({"messages": history})["messages"][1:]
        history.append(HumanMessage("and?"))
        state = graph.invoke({"messages": history})
        state["messages"].append(HumanMessage("bye"))
    found = run.trajectory()
    assert [one["content"] for one in found.input["messages"]] == ["hi"]
    assert [one["content"] for one in found.output["messages"]] == ["hi", "one", "and?", "two"]


def test_a_state_that_is_a_data_class_is_recorded_by_its_fields() -> None:
    @dataclass
    class Question:
        words: str
        messages: list[Any] = field(default_factory=list[Any])

    graph = StateGraph(Question).add_node("n", lambda state: {"words": state.words + "!"})
    with capture() as run:
        graph.add_edge(START, "n").compile().invoke(Question("why?", [HumanMessage("hi")]))
    assert run.trajectory().input == {
        "words": "why?",
        "messages": [{"role": "user", "content": "hi"}],
    }


# ---- shapes


class Fan(TypedDict):
    words: Annotated[list[str], operator.add]


def test_equal_branches_go_on_in_their_own() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def worker(word: Any) -> Fan:
        model = Scripted(lines=["same"])
        first = model.invoke([HumanMessage("same")])
        barrier.wait()
        model.invoke([HumanMessage("same"), first, HumanMessage("more")])
        return {"words": []}

    graph = StateGraph(Fan).add_node("split", lambda state: {"words": []})
    graph.add_node("worker", worker).add_edge(START, "split")
    graph.add_conditional_edges("split", lambda s: [Send("worker", word) for word in "ab"])
    with capture() as run:
        graph.compile().invoke({"words": []})
    second = [turn for turn in run.turns if turn.extends is not None]
    assert len(second) == 2
    for turn in second:
        assert run.turns[turn.extends or 0].namespace == turn.namespace


# ---- who hears


def test_a_scope_inside_of_a_node() -> None:
    seen: list[Any] = []
    model = Scripted(lines=["x"])

    def inside(state: MessagesState) -> Any:
        with capture() as run:
            model.invoke("1")
            (model | RunnableLambda(lambda m: m)).invoke("2")
            (model | RunnableLambda(lambda m: m)).invoke("3")
        seen.append(run)
        return {}

    with capture() as outer:
        graph_of(inside=inside).compile().invoke(ASK)
    assert len(lived(seen[0])) == len(lived(outer)) == 3


def test_a_handler_in_the_config_only() -> None:
    handler = CaptureHandler()
    graph = graph_of(a=node(Scripted(lines=["x"])), b=node(Scripted(lines=["y"]))).compile()
    graph.invoke(ASK, {"callbacks": [handler]})
    assert [turn.node for turn in handler.run.turns] == ["a", "b"]
    assert handler.run.status == "completed"
    with capture() as run:
        graph.invoke(ASK, {"callbacks": [handler]})
    assert len(run.turns) == 2
    assert len(handler.run.turns) == 4


def test_handlers_in_the_config_hear_a_call_with_callbacks_of_its_own() -> None:
    handlers = [CaptureHandler() for _ in range(3)]
    outer = CaptureHandler()
    model = Scripted(lines=["x"])

    def alone(state: Any) -> Any:
        return {"messages": [model.invoke("a", {"callbacks": [BaseCallbackHandler()]})]}

    inner = graph_of(alone=alone).compile()

    def nested(state: Any) -> Any:
        return inner.invoke(state, {"callbacks": [*handlers, *handlers[:1]]})

    graph_of(nested=nested).compile().invoke(ASK, {"callbacks": [outer]})
    for handler in [*handlers, outer]:
        assert [turn.node for turn in handler.run.turns] == ["alone"]
        assert handler.run.status == "completed"
    model.invoke("b")  # outside of the graph nobody hears
    assert all(len(handler.run.turns) == 1 for handler in [*handlers, outer])


def test_a_broken_payload_harms_no_graph_and_is_no_secret() -> None:
    class Odd(Scripted):
        def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
            return {"ls_model_name": "odd"}

        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
            reply = AIMessage("x", usage_metadata=None)
            object.__setattr__(reply, "usage_metadata", {"input_tokens": 1})
            return ChatResult(generations=[ChatGeneration(message=reply)])

    with capture() as run:
        assert Odd(lines=[""]).invoke("?").content == "x"
    assert run.error is not None
    assert "on_llm_end" in run.error
    run.trajectory()


def test_odd_messages_become_text() -> None:
    odd = HumanMessage([{"type": "text"}])  # a text block without its text
    with capture() as run:
        Scripted(lines=["x"]).invoke([SystemMessage("s"), odd])
    assert run.turns[0].messages[1]["role"] in ("human", "user")
    run.trajectory().model_dump_json()


# ---- size


def chat_bytes(turns: int) -> int:
    lines = [calls("look", f"c{i}", what="x" * 200) for i in range(turns - 1)]
    agent = create_agent(Scripted(lines=[*lines, "done"]), [look], system_prompt="s" * 500)
    with capture() as run:
        agent.invoke(ASK, {"recursion_limit": 4 * turns})
    trajectory = run.trajectory()
    assert [turn.extends for turn in run.turns] == [None, *range(turns - 1)]
    assert len(trajectory.prompt(turns - 1)) == 2 * turns
    return len(trajectory.model_dump_json())


def test_size_is_linear_in_turns() -> None:
    assert chat_bytes(40) <= 2.1 * chat_bytes(20)

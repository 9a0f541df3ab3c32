import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, message_to_dict
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.func import entrypoint
from langgraph.func import task as functional_task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send
from pydantic import BaseModel

from langchain_art import capture
from tests.support.graphs import Answering, Scripted

ASK = [HumanMessage("hi")]
USAGE: Any = {"input_tokens": 1, "output_tokens": 9, "total_tokens": 10}


class Several(Answering):
    """Gives three choices for each request."""

    def choices(self, messages: Any) -> list[AIMessage]:
        return [AIMessage(text, usage_metadata=USAGE) for text in ("one", "two", "three")]


@dataclass
class Noted:
    """A state that is a data class."""

    messages: Annotated[list[Any], add_messages]


def fates(run: Any) -> list[tuple[Any, Any]]:
    return [(turn.reply["content"], turn.excluded_because) for turn in run.turns]


def through(node: Any) -> Any:
    """Runs a node in a graph, and gives the run."""
    with capture() as run:
        graph = StateGraph(MessagesState).add_node("a", node).add_node("b", lambda state: {})
        graph.add_edge(START, "a").compile().invoke({"messages": ASK})
    return run


def test_a_prompt_that_goes_on_with_a_choice_chooses_it() -> None:
    with capture() as run:
        second = Several().generate([ASK]).generations[0][1].message
        FakeListChatModel(responses=["more"]).invoke([*ASK, second, HumanMessage("Go on.")])
    assert fates(run)[:3] == [("one", "unchosen"), ("two", None), ("three", "unchosen")]
    assert run.turns[3].extends == 1


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "returned",
    [
        lambda choice: {"messages": [choice.message]},
        lambda choice: {"messages": [("ai", choice.text)]},
        lambda choice: Command(goto=Send("b", {"messages": [AIMessage(f" {choice.text}\n")]})),
        lambda choice: Noted([choice.message]),
    ],
)
def test_a_node_that_returns_a_choice_chooses_it(returned: Any, given: bool) -> None:
    def node(state: Any, config: RunnableConfig) -> Any:
        result = Several().generate([ASK], callbacks=config["callbacks"] if given else None)
        return returned(result.generations[0][2])

    run = through(node)
    assert fates(run) == [("one", "unchosen"), ("two", "unchosen"), ("three", None)]
    assert run.turns[0].node == "a"


@pytest.mark.parametrize("output", [{"messages": [("ai", "on")]}, {}, None])
def test_of_choices_that_the_node_made_something_else_of_none_counts(output: Any) -> None:
    def node(state: Any) -> Any:
        Several().generate([ASK])
        return output

    assert [why for _, why in fates(through(node))] == ["unchosen"] * 3


class Found(BaseModel):
    """An answer that is parsed."""

    answer: str
    sure: float


def said(reply: AIMessage) -> str:
    return Found.model_validate_json(reply.text).answer


@pytest.mark.parametrize(
    "returned",
    [
        lambda reply: {"messages": [reply]},
        lambda reply: {"messages": reply},
        lambda reply: [Command(update={"messages": [reply]})],
        lambda reply: {"messages": [reply.model_copy(update={"name": "ann"})]},
        lambda reply: {"answer": message_to_dict(reply)},
        lambda reply: {"messages": [{"role": "assistant", "content": reply.text}]},
        lambda reply: {"messages": [AIMessage(reply.text)]},
        lambda reply: {"messages": [HumanMessage([{"type": "text", "text": reply.text}])]},
        lambda reply: {"messages": [("ai", f"Here it is: {reply.text}!")]},
        lambda reply: {"answer": reply.text},
        lambda reply: {"answer": f"{reply.text}\n", "attempts": 4},
        lambda reply: {"answer": reply.model_dump()},
        lambda reply: {"answer": Found.model_validate_json(reply.text)},
        lambda reply: {"answer": json.loads(reply.text), "attempts": 4},
        lambda reply: json.loads(reply.text),
        lambda reply: {"answer": said(reply)},
        lambda reply: {"answer": {"by": ["ann"], "is": said(reply)}},
        lambda reply: {"answer": re.findall(r"\d[.]\d", reply.text)[0]},
        lambda reply: Command(update={"answer": said(reply)}),
        lambda reply: Command(goto=Send("b", {"answer": said(reply)})),
        lambda reply: {"sure": Found.model_validate_json(reply.text).sure},
    ],
)
def test_asked_again_until_good_enough(returned: Any) -> None:
    answers = [Found(answer=f"Day {day}", sure=day / 10).model_dump_json() for day in (1, 3, 2, 4)]

    def node(state: Any) -> Any:
        while True:
            reply = model.invoke(ASK)
            if json.loads(reply.text)["sure"] > 0.35:
                return returned(reply)

    model = FakeListChatModel(responses=answers)
    expected = ["unchosen"] * 3 + [None]
    assert [why for _, why in fates(through(node))] == expected
    model = FakeListChatModel(responses=answers)
    assert [why for _, why in fates(in_a_task(node))] == expected


def in_a_task(node: Any) -> Any:
    """Runs a node's body as a task of the functional API, and gives the run."""
    task = functional_task(node)
    with capture() as run:
        entrypoint()(lambda given: task(given).result() and None).invoke({"messages": ASK})
    return run


@pytest.mark.parametrize(
    "returned",
    [
        lambda reply: {"messages": [AIMessage("", tool_calls=reply.tool_calls)]},
        lambda reply: {"answer": reply.tool_calls[0]["args"]},
        lambda reply: {"answer": reply.tool_calls[0]["args"]["day"]},
        lambda reply: {"answer": reply.tool_calls},
    ],
)
def test_a_call_of_a_tool_asked_for_again(returned: Any) -> None:
    calls = [{"name": "note", "args": {"day": day, "who": "Ann"}, "id": "1"} for day in (1, 3, 2)]
    model = Scripted(lines=[AIMessage("", tool_calls=[call]) for call in calls])
    run = through(lambda state: returned([model.invoke(ASK) for _ in range(3)][1]))
    assert [why for _, why in fates(run)] == ["unchosen", None, "unchosen"]


def test_a_route_asked_for_again() -> None:
    model = FakeListChatModel(responses=["to c", "to b"])
    run = through(lambda state: Command(goto=[model.invoke(ASK).text[3:] for _ in "ab"][1]))
    assert [why for _, why in fates(run)] == ["unchosen", None]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda votes: max(votes, key=votes.count), [None, "unchosen", None]),
        (lambda votes: votes, [None] * 3),
        (lambda votes: "\n".join(votes), [None] * 3),
        (lambda votes: votes[0], [None, "unchosen", None]),
        (lambda votes: votes[1], ["unchosen", None, "unchosen"]),
    ],
)
def test_equal_replies_that_are_returned_as_texts_cannot_be_told_apart(
    returned: Any, expected: list[Any]
) -> None:
    model = FakeListChatModel(responses=["yes", "no", "yes"])
    run = through(lambda state: {"vote": returned([model.invoke(ASK).text for _ in range(3)])})
    assert [why for _, why in fates(run)] == expected


@pytest.mark.parametrize("form", [lambda reply: reply, lambda reply: reply.model_dump()])
def test_equal_replies_are_told_apart_by_their_ids(form: Any) -> None:
    model = FakeListChatModel(responses=["yes"])
    run = through(lambda state: {"messages": [form([model.invoke(ASK) for _ in "abc"][1])]})
    assert [why for _, why in fates(run)] == ["unchosen", None, "unchosen"]


def test_an_equal_reply_that_a_fallback_replaced_does_not_count() -> None:
    model = FakeListChatModel(responses=["yes"])

    def breaks(reply: Any) -> Any:
        raise ValueError("broken")

    def node(state: Any) -> Any:
        first = model.invoke(ASK)
        (model | breaks).with_fallbacks([RunnableLambda(lambda _: None)]).invoke(ASK)
        return {"answer": first.text}

    assert [why for _, why in fates(through(node))] == [None, "error"]


def test_replies_of_which_the_node_made_something_else_all_count() -> None:
    model = FakeListChatModel(responses=["3 of 5", "4 of 5", "3 of 5"])

    def node(state: Any) -> Any:
        marks = [int(model.invoke(ASK).text[0]) for _ in range(3)]
        return {"answer": sum(marks) / 3, "by": "a judge"}

    assert [why for _, why in fates(through(node))] == [None] * 3


class Asked(FakeListChatModel):
    """Whose parameters are those of OpenAI's models, by name and by `bind`."""

    name_: str = "one"

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
        return {"ls_provider": "elsewhere", "ls_model_name": self.name_}


GOOD = Asked(responses=["good"])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Asked(responses=["good"], name_="two"), None),
        (GOOD.bind(tools=[{"type": "function", "function": {"name": "f"}}]), None),
        (GOOD.bind(response_format={"type": "json_object"}), None),
        (GOOD.bind(stop=["."]), None),
        (GOOD.bind(extra_body={"guided_regex": "a"}), None),
        (GOOD.bind(temperature=0.5), "unchosen"),
        (GOOD.bind(seed=2), "unchosen"),
        (GOOD.bind(extra_body={"top_k": 5}), "unchosen"),
        (GOOD.bind(user="ann"), "unchosen"),
    ],
)
def test_another_question_is_one_of_another_model_tools_or_shape_however_it_is_drawn(
    other: Any, why: str | None
) -> None:
    run = through(lambda state: {"messages": [GOOD.invoke(ASK), other.invoke(ASK)][1:]})
    assert [why for _, why in fates(run)] == [why, None]

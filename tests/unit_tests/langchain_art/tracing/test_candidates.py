import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, message_to_dict
from langchain_core.runnables import RunnableLambda
from langgraph.func import entrypoint
from langgraph.func import task as functional_task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send
from pydantic import BaseModel

from langchain_art import capture
from tests.support.graphs import Answering, Scripted

ASK = [HumanMessage("hi")]


class Several(Answering):
    """Gives three choices for each request."""

    def choices(self, messages: Any) -> list[AIMessage]:
        return [AIMessage(text) for text in ("one", "two", "three")]


@dataclass
class Noted:
    """A state that is a data class."""

    messages: Annotated[list[Any], add_messages]


class Found(BaseModel):
    """An answer that is parsed."""

    answer: str
    sure: float


def said(reply: AIMessage) -> str:
    return Found.model_validate_json(reply.text).answer


def fates(run: Any) -> list[str | None]:
    return [turn.excluded_because for turn in run.turns]


def through(node: Any) -> Any:
    """Runs a node in a graph, and gives the run."""
    with capture() as run:
        graph = StateGraph(MessagesState).add_node("a", node).add_node("b", lambda state: {})
        graph.add_edge(START, "a").compile().invoke({"messages": ASK})
    return run


def in_a_task(node: Any) -> Any:
    """Runs a node's body as a task of the functional API, and gives the run."""
    task = functional_task(node)
    with capture() as run:
        entrypoint()(lambda given: task(given).result() and None).invoke({"messages": ASK})
    return run


def test_a_prompt_that_goes_on_with_a_choice_chooses_it() -> None:
    with capture() as run:
        second = Several().generate([ASK]).generations[0][1].message
        FakeListChatModel(responses=["more"]).invoke([*ASK, second, HumanMessage("Go on.")])
    assert fates(run)[:3] == ["unchosen", None, "unchosen"]
    assert run.turns[3].extends == 1


def test_a_node_that_returns_a_choice_in_another_form_chooses_it() -> None:
    for returned in (
        lambda choice: {"messages": [("ai", choice.text)]},
        lambda choice: Command(goto=Send("b", {"messages": [AIMessage(f" {choice.text}\n")]})),
        lambda choice: Noted([choice.message]),
    ):
        run = through(lambda state, r=returned: r(Several().generate([ASK]).generations[0][2]))
        assert fates(run) == ["unchosen", "unchosen", None]


@pytest.mark.parametrize("how", [through, in_a_task])
@pytest.mark.parametrize(
    "returned",
    [
        lambda reply: {"messages": reply},
        lambda reply: [Command(update={"messages": [reply]})],
        lambda reply: {"answer": message_to_dict(reply)},
        lambda reply: {"messages": [HumanMessage([{"type": "text", "text": reply.text}])]},
        lambda reply: {"messages": [("ai", f"Here it is: {reply.text}!")]},
        lambda reply: {"answer": f"{reply.text}\n", "attempts": 4},
        lambda reply: {"answer": Found.model_validate_json(reply.text)},
        lambda reply: {"answer": json.loads(reply.text), "attempts": 4},
        lambda reply: {"answer": {"by": ["ann"], "is": said(reply)}},
        lambda reply: {"answer": re.findall(r"\d[.]\d", reply.text)[0]},
        lambda reply: Command(goto=Send("b", {"answer": said(reply)})),
        lambda reply: {"sure": Found.model_validate_json(reply.text).sure},
    ],
)
def test_asked_again_until_good_enough(returned: Any, how: Any) -> None:
    def node(state: Any) -> Any:
        while True:
            reply = model.invoke(ASK)
            if json.loads(reply.text)["sure"] > 0.35:
                return returned(reply)

    answers = [Found(answer=f"Day {day}", sure=day / 10).model_dump_json() for day in (1, 3, 2, 4)]
    model = FakeListChatModel(responses=answers)
    assert fates(how(node)) == ["unchosen"] * 3 + [None]


CALLS = [
    AIMessage("", tool_calls=[{"name": "note", "args": {"day": day, "who": "Ann"}, "id": "1"}])
    for day in (1, 3, 2)
]
VOTES, MARKS = ["yes", "no", "yes"], ["3 of 5", "4 of 5", "3 of 5"]


@pytest.mark.parametrize(
    ("lines", "returned", "kept"),
    [
        (CALLS, lambda found: AIMessage("", tool_calls=found[1].tool_calls), {1}),
        (CALLS, lambda found: found[1].tool_calls[0]["args"]["day"], {1}),
        (CALLS, lambda found: found[1].tool_calls, {1}),
        (["to c", "to b", "to c"], lambda found: Command(goto=found[1].text[3:]), {1}),
        # Equal replies cannot be told apart by their text, but by their ids.
        (VOTES, lambda found: max(VOTES, key=VOTES.count), {0, 2}),
        (VOTES, lambda found: [one.text for one in found], {0, 1, 2}),
        (VOTES, lambda found: "\n".join(one.text for one in found), {0, 1, 2}),
        (VOTES, lambda found: found[1].text, {1}),
        (["yes"] * 3, lambda found: found[1], {1}),
        (["yes"] * 3, lambda found: found[1].model_dump(), {1}),
        # The node made something else of them.
        (MARKS, lambda found: sum(int(one.text[0]) for one in found) / 3, {0, 1, 2}),
    ],
)
def test_of_several_replies_those_count_that_the_output_holds(
    lines: Any, returned: Any, kept: set[int]
) -> None:
    def node(state: Any) -> Any:
        output = returned([model.invoke(ASK) for _ in lines])
        return output if isinstance(output, Command) else {"answer": output, "by": "a judge"}

    model = Scripted(lines=[*lines])
    assert fates(through(node)) == [None if n in kept else "unchosen" for n in range(3)]


def test_an_equal_reply_that_a_fallback_replaced_does_not_count() -> None:
    model = FakeListChatModel(responses=["yes"])

    def breaks(reply: Any) -> Any:
        raise ValueError("broken")

    def node(state: Any) -> Any:
        first = model.invoke(ASK)
        (model | breaks).with_fallbacks([RunnableLambda(lambda _: None)]).invoke(ASK)
        return {"answer": first.text}

    assert fates(through(node)) == [None, "error"]


class Asked(FakeListChatModel):
    """Whose parameters are those of OpenAI's models, by `bind`."""

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
        return {"ls_provider": "elsewhere", "ls_model_name": "one"}


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        ({"response_format": {"type": "json_object"}}, None),
        ({"extra_body": {"guided_regex": "a"}}, None),
        ({"seed": 2}, "unchosen"),
        ({"extra_body": {"top_k": 5}}, "unchosen"),
        ({"user": "ann"}, "unchosen"),
    ],
)
def test_another_question_is_one_of_another_shape_however_it_is_drawn(
    bound: dict[str, Any], why: str | None
) -> None:
    good = Asked(responses=["good"])
    other = good.bind(**bound)
    run = through(lambda state: {"messages": [good.invoke(ASK), other.invoke(ASK)][1:]})
    assert fates(run) == [why, None]

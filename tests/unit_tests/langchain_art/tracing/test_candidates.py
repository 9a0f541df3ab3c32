"""Which of several answers to one prompt count."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from langchain_art import capture

ASK = [HumanMessage("hi")]
USAGE: Any = {"input_tokens": 1, "output_tokens": 9, "total_tokens": 10}


class Several(BaseChatModel):
    """Gives three choices for each request."""

    @property
    def _llm_type(self) -> str:
        return "several"

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        replies = [AIMessage(text, usage_metadata=USAGE) for text in ("one", "two", "three")]
        return ChatResult(generations=[ChatGeneration(message=reply) for reply in replies])


def fates(run: Any) -> list[tuple[Any, Any]]:
    return [(turn.reply["content"], turn.excluded_because) for turn in run.turns]


def through(node: Any) -> Any:
    """Runs a node in a graph, and gives the run."""
    with capture() as run:
        StateGraph(MessagesState).add_node("a", node).add_edge(START, "a").compile().invoke(
            {"messages": ASK}
        )
    return run


def test_of_several_choices_the_first_counts() -> None:
    with capture() as run:
        assert Several().invoke(ASK).content == "one"
    assert fates(run) == [("one", None), ("two", "unchosen"), ("three", "unchosen")]
    assert [turn.usage for turn in run.turns] == [None] * 3  # only their sum is known
    assert [turn.extends for turn in run.turns] == [None] * 3
    run.trajectory()


def test_a_prompt_that_goes_on_with_a_choice_chooses_it() -> None:
    with capture() as run:
        second = Several().generate([ASK]).generations[0][1].message
        FakeListChatModel(responses=["more"]).invoke([*ASK, second, HumanMessage("Go on.")])
    assert fates(run)[:3] == [("one", "unchosen"), ("two", None), ("three", "unchosen")]
    assert run.turns[3].extends == 1


def test_a_node_that_returns_a_choice_chooses_it() -> None:
    def node(state: Any, config: RunnableConfig) -> Any:
        result = Several().generate([ASK], callbacks=config["callbacks"])
        return {"messages": [result.generations[0][2].message]}

    run = through(node)
    assert fates(run) == [("one", "unchosen"), ("two", "unchosen"), ("three", None)]


@pytest.mark.parametrize(
    "returned",
    [
        lambda replies: {"messages": replies[1:]},
        lambda replies: {"messages": replies[1]},
        lambda replies: Command(update={"messages": replies[1:]}),
        lambda replies: [Command(update={"messages": replies[1:]})],
    ],
)
def test_a_reply_that_the_node_does_not_return_is_not_chosen(returned: Any) -> None:
    model = FakeListChatModel(responses=["bad", "good"])
    run = through(lambda state: returned([model.invoke(ASK), model.invoke(ASK)]))
    assert fates(run) == [("bad", "unchosen"), ("good", None)]


def test_replies_that_are_not_returned_as_such_all_count() -> None:
    model = FakeListChatModel(responses=["yes", "no", "yes"])

    def node(state: Any) -> Any:
        votes = [model.invoke(ASK).text for _ in range(3)]
        return {"messages": [("ai", max(votes, key=votes.count))]}

    run = through(node)
    assert [fate for _, fate in fates(run)] == [None] * 3


def test_answers_to_other_prompts_are_no_rivals() -> None:
    model = FakeListChatModel(responses=["plan", "answer"])

    def node(state: Any) -> Any:
        plan = model.invoke("Plan.")
        return {"messages": [model.invoke(f"Do {plan.text}.")]}

    assert fates(through(node)) == [("plan", None), ("answer", None)]


def test_a_reply_that_the_node_itself_went_on_with_counts() -> None:
    model = FakeListChatModel(responses=["draft", "better", "other"])

    def node(state: Any) -> Any:
        draft = model.invoke(ASK)
        model.invoke([*ASK, draft, HumanMessage("Better?")])
        return {"messages": [model.invoke(ASK)]}

    assert fates(through(node)) == [("draft", None), ("better", None), ("other", None)]


def test_the_same_prompt_in_another_task_is_no_rival() -> None:
    model = FakeListChatModel(responses=["one", "two"])
    graph = StateGraph(MessagesState)
    graph.add_node("a", lambda state: {"messages": [model.invoke(ASK)]})
    graph.add_node("b", lambda state: {"messages": [model.invoke(ASK)]})
    with capture() as run:
        graph.add_edge(START, "a").add_edge("a", "b").compile().invoke({"messages": ASK})
    assert fates(run) == [("one", None), ("two", None)]

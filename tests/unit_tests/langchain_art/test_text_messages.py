"""Text messages are converted as LangChain converts them: its two conversions are the measure."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from langchain_art import ChatART
from langchain_art.client.conversations import read_conversations
from langchain_art.text_messages import text_message
from langchain_art.tracing.message_log import wire_message

_OPENAI = ChatOpenAI(model="m", api_key=SecretStr("none"))
_TEXTS = st.text(max_size=20)
_NAMES = st.none() | _TEXTS
_ARGUMENTS = st.dictionaries(
    _TEXTS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXTS, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)
_CALLS = st.lists(
    st.fixed_dictionaries({"name": _TEXTS, "args": _ARGUMENTS, "id": _NAMES}), max_size=2
)
_REASONING = st.just({}) | st.builds(lambda text: {"reasoning_content": text}, _TEXTS)
_MESSAGES: st.SearchStrategy[BaseMessage] = st.one_of(
    st.builds(SystemMessage, _TEXTS, name=_NAMES),
    st.builds(HumanMessage, _TEXTS, name=_NAMES, id=_NAMES),
    st.builds(ToolMessage, _TEXTS, tool_call_id=_TEXTS, name=_NAMES, artifact=_TEXTS),
    *(
        st.builds(kind, _TEXTS, name=_NAMES, tool_calls=_CALLS, additional_kwargs=_REASONING)
        for kind in (AIMessage, AIMessageChunk)
    ),
)


def _sent(message: BaseMessage) -> dict[str, Any]:
    """As `ChatOpenAI` sends it, with the reasoning that it leaves out."""
    sent = _OPENAI._get_request_payload([message])["messages"][0]
    if reasoning := message.additional_kwargs.get("reasoning_content"):
        sent["reasoning_content"] = reasoning
    return {name: value for name, value in sent.items() if name != "name" or value}


@given(_MESSAGES)
def test_a_text_message_is_as_it_is_sent_and_as_langchain_has_it(message: BaseMessage) -> None:
    found = text_message(message)
    assert found is not None
    assert found == _sent(message)
    other = convert_to_openai_messages(message)
    assert isinstance(other, dict)
    if isinstance(message, ToolMessage):
        other.pop("name", None)
    if "tool_calls" in other:
        other["content"] = other["content"] or None
    if reasoning := message.additional_kwargs.get("reasoning_content"):
        other["reasoning_content"] = reasoning
    assert list(found.items()) == list(other.items())  # in the same order, too


def test_other_messages_are_left_to_langchain_in_their_order() -> None:
    broken: Any = {"name": "look", "args": "{", "id": "c1", "error": "no"}
    others: list[BaseMessage] = [
        HumanMessage([{"type": "text", "text": "hi"}]),
        HumanMessage("hi", additional_kwargs={"name": "ann"}),
        SystemMessage("hi", additional_kwargs={"__openai_role__": "developer"}),
        ChatMessage("hi", role="critic"),
        AIMessage("hi", invalid_tool_calls=[broken]),
        AIMessage("hi", additional_kwargs={"refusal": "no"}),
        ToolMessage("hi", tool_call_id="c1", additional_kwargs={"name": "look"}),
    ]
    for message in others:
        assert text_message(message) is None
        assert wire_message(message)["content"]
    model = ChatART(model="m", base_url="http://localhost:1/v1")
    prompt = [one for other in others for one in (other, AIMessage("text"))]
    alone = [model._get_request_payload([message])["messages"][0] for message in prompt]
    assert model._get_request_payload(prompt)["messages"] == alone


def test_a_conversation_to_learn_from_has_what_a_captured_run_has_and_its_images() -> None:
    broken = {"name": "f", "args": "{", "id": "c", "error": None, "type": "invalid_tool_call"}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    replies = [
        AIMessage("a", additional_kwargs={"reasoning_content": "so"}),
        AIMessage([{"type": "reasoning", "reasoning": "so"}, {"type": "text", "text": "a"}]),
        AIMessage("", invalid_tool_calls=[broken]),
    ]
    chain = [one for reply in replies for one in (HumanMessage([image]), reply)]
    [read] = read_conversations([chain])
    assert not isinstance(read, str)
    assert [turn.reply for turn in read.turns] == [wire_message(reply) for reply in replies]
    assert all(turn.messages[-1]["content"] == [image] for turn in read.turns)

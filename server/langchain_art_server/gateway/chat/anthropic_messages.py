"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages, for its clients.

Format: Anthropic's API reference, "Messages" and "Streaming messages".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic_core import from_json, to_json

from langchain_art.errors import InvalidRequest, RequestRefused
from langchain_art.wire import CallTags
from langchain_art_server.backends.base import ChatDelta, ChatReply
from langchain_art_server.gateway.chat.completion_format import event
from langchain_art_server.gateway.chat.dialect import (
    BEGIN,
    END,
    Dialect,
    Kind,
    Part,
    Text,
    Thoughts,
    content_of,
    split,
    tool_call,
)
from langchain_art_server.gateway.chat.request import CheckedChatRequest, StopStrings, read_body
from langchain_art_server.gateway.refusals import anthropic_error

_KEEPS_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
#: Options that are not supported, and their values that have no effect, which are accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": (None, "auto", "standard_only"),
    "container": (None,),
    "mcp_servers": (None, []),
    "inference_geo": (None,),
    "context_management": (None, {"edits": []}, {"edits": [_KEEPS_THOUGHTS]}),
    "speed": (None, "standard"),
}
#: Options that change no reply; they are ignored.
_NOTES = ("metadata", "cache_control")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Text(Text):
    type: Literal["text"]


class _Thinking(Part):
    type: Literal["thinking"]
    thinking: str


class _ToolUse(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_Text] | None = None


_Block = Annotated[_Text | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(Part):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Part):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class _Choice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _ThinkingOption(Part):
    """Makes thoughts blocks of their own. A budget has no effect: their length is the model's."""

    type: Literal["enabled", "disabled", "adaptive"]


class _Format(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Part):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: _Format | None = None
    effort: str | None = None
    """Without effect: the length of a thought is the model's."""


class TokenCountBody(Part):
    """The body of a request that counts tokens, without `_NEUTRAL` and `_NOTES`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    messages: list[_Message] = Field(min_length=1, max_length=4096)
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _ThinkingOption | None = None
    output_config: _OutputConfig | None = None
    art: CallTags | None = None


class MessagesBody(TokenCountBody):
    """The body of a request, without the options of `_NEUTRAL` and `_NOTES`."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: StopStrings | None = None
    seed: int | None = None
    """Seed of the sampling, as in chat completions: an addition to this format."""
    stream: bool | None = None


class MessagesDialect(Dialect):
    """One request. See `Dialect`."""

    prefix = "msg_"

    def __init__(self, raw: Any) -> None:
        super().__init__()
        body = read_body(raw, MessagesBody, _NEUTRAL, _NOTES)
        self.body = {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "seed": body.seed,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
            **self._prompt(body, raw),
        }

    def _prompt(self, body: TokenCountBody, raw: dict[str, Any]) -> dict[str, Any]:
        """The fields of `body` that both kinds of request have."""
        self._splits = body.thinking is not None and body.thinking.type != "disabled"
        messages: list[dict[str, Any]] = []
        if body.system:
            messages.append({"role": "system", "content": content_of(body.system)})
        for index, one in enumerate(body.messages):
            messages += _messages(index, one)
        choice = body.tool_choice
        form: dict[str, Any] | None = None
        if body.output_config is not None and (output := body.output_config.format) is not None:
            named = {"name": "output", "schema": output.schema_}
            form = {"type": "json_schema", "json_schema": named}
        return {
            "model": body.model,
            "messages": messages,
            "tools": [_tool(one) for one in body.tools] if body.tools else None,
            "tool_choice": _tool_choice(choice) if choice is not None else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "response_format": form,
            "art": raw.get("art"),
        }

    async def whole(
        self, frame: dict[str, Any], call: CheckedChatRequest, replies: list[ChatReply]
    ) -> bytes:
        """See `Dialect`."""
        [reply] = replies
        thought, text = split(reply.content) if self._splits else (None, reply.content or "")
        content: list[dict[str, Any]] = []
        if thought is not None:
            content.append(_opened("thought") | {"thinking": thought})
        if text:
            content.append(_opened("text") | {"text": text})
        for one in reply.tool_calls:
            content.append(
                _tool_use(one) | {"input": from_json(one["function"]["arguments"] or "{}")}
            )
        return to_json(
            _message(frame) | _ended(reply) | {"content": content, "usage": _usage(reply)}
        )

    def begin(self, frame: dict[str, Any], call: CheckedChatRequest) -> bytes:
        """See `Dialect`."""
        self._thoughts, self._blocks = Thoughts(), 0
        self._open: Kind | None = None
        message = _message(frame) | {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": 0, "output_tokens": 0}
        return event({"type": "message_start", "message": message | {"usage": usage}})

    def delta(self, index: int, piece: ChatDelta) -> bytes:
        """See `Dialect`. Tool calls, which are whole, come at the end, after all of the text."""
        return self._said(
            self._thoughts.feed(piece.content) if self._splits else [("text", piece.content)]
        )

    async def end(self, index: int, reply: ChatReply) -> bytes:
        """See `Dialect`."""
        events = [self._said(self._thoughts.rest())]
        if self._open is not None:
            events.append(self._stop())
        for one in reply.tool_calls:
            events.append(self._start(_tool_use(one) | {"input": {}}))
            made = one["function"]["arguments"]
            events.append(self._delta({"type": "input_json_delta", "partial_json": made}))
            events.append(self._stop())
        ended = {"type": "message_delta", "delta": _ended(reply), "usage": _usage(reply)}
        return b"".join([*events, event(ended)])

    def close(self, replies: list[ChatReply]) -> bytes:
        """See `Dialect`."""
        return event({"type": "message_stop"})

    def refusal(self, error: RequestRefused) -> bytes:
        """See `Dialect`."""
        return event(anthropic_error(error.status, error.body()))

    def _said(self, pieces: list[tuple[Kind, str]]) -> bytes:
        events: list[bytes] = []
        for kind, text in pieces:
            if kind != self._open and (text or kind == "thought"):
                if self._open is not None:
                    events.append(self._stop())
                events.append(self._start(_opened(kind)))
                self._open = kind
            if text and kind == "thought":
                events.append(self._delta({"type": "thinking_delta", "thinking": text}))
            elif text:
                events.append(self._delta({"type": "text_delta", "text": text}))
        return b"".join(events)

    def _start(self, block: dict[str, Any]) -> bytes:
        started = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        return event(started)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _stop(self) -> bytes:
        stopped = event({"type": "content_block_stop", "index": self._blocks})
        self._open, self._blocks = None, self._blocks + 1
        return stopped


class TokenCount(MessagesDialect):
    """One request whose prompt's tokens are counted. One token is sampled and dropped."""

    only_counts = True

    def __init__(self, raw: Any) -> None:
        Dialect.__init__(self)
        body = read_body(raw, TokenCountBody, _NEUTRAL, _NOTES)
        self.body = {"max_tokens": 1} | self._prompt(body, raw)

    async def whole(
        self, frame: dict[str, Any], call: CheckedChatRequest, replies: list[ChatReply]
    ) -> bytes:
        """See `Dialect`."""
        return to_json({"input_tokens": len(replies[0].prompt_token_ids)})


def _messages(index: int, message: _Message) -> list[dict[str, Any]]:
    """The messages of chat completions: each tool's result is one of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if not message.content and message.role != "assistant":  # whose reply may have no block
        raise InvalidRequest(
            f"messages.{index}.content: got no block, expected one at least", param="messages"
        )
    made: list[dict[str, Any]] = []
    said, calls = list[str](), list[dict[str, Any]]()
    for place, block in enumerate(message.content):
        of_model = isinstance(block, _Thinking | _ToolUse)
        if of_model != (message.role == "assistant") and not isinstance(block, _Text):
            raise InvalidRequest(
                f"messages.{index}.content.{place}: got a block {block.type!r} in a message of the "
                f"role {message.role!r}, expected it in one of "
                f"{'the assistant' if of_model else 'the user'}",
                param="messages",
            )
        if isinstance(block, _ToolResult):
            result = content_of(block.content or "")
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        elif isinstance(block, _ToolUse):
            calls.append(tool_call(block.id, block.name, to_json(block.input).decode()))
        elif isinstance(block, _Thinking):
            said.append(f"{BEGIN}{block.thinking}{END}")
        elif message.role == "assistant":
            said.append(block.text)
        elif made and made[-1]["role"] == message.role:
            made[-1]["content"].append({"type": "text", "text": block.text})
        else:
            made.append({"role": message.role, "content": [{"type": "text", "text": block.text}]})
    if message.role != "assistant":
        return made
    whole: dict[str, Any] = {"role": "assistant", "content": "".join(said) or None}
    return [whole | {"tool_calls": calls} if calls else whole]


def _tool(tool: _Tool) -> dict[str, Any]:
    # In the order in which OpenAI's clients write them: templates show them as they stand.
    about = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **about, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: _Choice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _message(frame: dict[str, Any]) -> dict[str, Any]:
    about = {"id": frame["id"], "model": frame["model"]}
    return about | {"type": "message", "role": "assistant"}


def _ended(reply: ChatReply) -> dict[str, Any]:
    reason = _STOP_REASONS[reply.finish_reason]
    if reason == "end_turn" and reply.stopped_by is not None:
        reason = "stop_sequence"
    found = reply.stopped_by if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": found}


def _usage(reply: ChatReply) -> dict[str, int]:
    tokens = {"input_tokens": len(reply.prompt_token_ids), "output_tokens": len(reply.token_ids)}
    return tokens | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _opened(kind: Kind) -> dict[str, Any]:
    """An empty block."""
    if kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}

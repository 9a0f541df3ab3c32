"""POST /v1/responses: OpenAI's Responses, for its clients.

The records of calls are what ``previous_response_id`` continues, so every response is stored, and
kept as long as any call. Format: OpenAI's API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic_core import from_json, to_json

from langchain_art.errors import InvalidRequest, RequestRefused
from langchain_art.wire import CallTags
from langchain_art_server.backends.base import ChatDelta, ChatReply
from langchain_art_server.gateway.chat.completion_format import event, logprobs
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
from langchain_art_server.gateway.chat.images import give_back_images
from langchain_art_server.gateway.chat.request import MAX_COUNT, CheckedChatRequest, read_body
from langchain_art_server.storage.tables import CallRecord

#: Options that are not supported, and their values that have no effect, which are accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "context_management": (None, []),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "service_tier": (None, "auto", "default"),
    "stream_options": (None, {}, {"include_obfuscation": False}),
    "truncation": (None, "disabled"),
}
#: Options that change no reply; they are ignored.
_NOTES = (
    "client_metadata",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning",  # how long a model thinks is its own choice
    "safety_identifier",
    "user",
)
_LOGPROBS = "message.output_text.logprobs"


class _Text(Text):
    type: Literal["input_text", "output_text", "reasoning_text", "text"]


class _Message(Part):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Text]


class _FunctionCall(Part):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _FunctionOutput(Part):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Text]


class _Reasoning(Part):
    type: Literal["reasoning"]
    content: list[_Text] | None = None


def _type_of(item: Any) -> str:
    return str(item.get("type", "message") if isinstance(item, dict) else type(item).__name__)


_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_FunctionOutput, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(_type_of),
]


class _Tool(Part):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Format(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "output"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class _TextOptions(Part):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: _Format | None = None
    verbosity: None = None


class ResponsesBody(Part):
    """The body of a request, without the options of `_NEUTRAL` and `_NOTES`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    input: str | Annotated[list[_Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: _TextOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    """Seed of the sampling, as in chat completions: an addition to this format."""
    top_logprobs: int | None = None
    store: bool = True
    """The call is recorded, and can be continued, either way."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    stream: bool | None = None
    art: CallTags | None = None


class ResponsesDialect(Dialect):
    """One request. See `Dialect`."""

    prefix = "resp_"

    def __init__(self, raw: Any) -> None:
        super().__init__()
        self._asked = body = read_body(raw, ResponsesBody, _NEUTRAL, _NOTES)
        if body.instructions is not None:  # a call that continues this one leaves them out
            self.recorded = {"instructions": body.instructions}
        items = body.input
        if isinstance(items, str):
            items = [_Message(role="user", content=items)]
        messages = _messages(items)
        if body.instructions is not None:
            messages.insert(0, {"role": "system", "content": body.instructions})
        form = body.text.format if body.text is not None else None
        self.body: dict[str, Any] = {
            "model": body.model,
            "messages": messages,
            "max_tokens": body.max_output_tokens,
            "tools": [_tool(one) for one in body.tools] if body.tools else None,
            "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _response_format(form) if form is not None else None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "seed": body.seed,
            "logprobs": True if _LOGPROBS in (body.include or ()) or body.top_logprobs else None,
            "top_logprobs": body.top_logprobs,
            "stream": body.stream,
            "art": raw.get("art"),
        }

    async def refer(self, call_of: Callable[[str], Awaitable[CallRecord]]) -> None:
        """See `Dialect`."""
        if self._asked.previous_response_id is None:
            return
        previous = await call_of(self._asked.previous_response_id)
        before = previous.request["messages"]["instructions" in previous.request :]
        give_back_images(before, previous.images)
        given = self._asked.instructions is not None
        own = self.body["messages"]
        self.body["messages"] = [*own[:given], *before, previous.reply, *own[given:]]

    async def whole(
        self, frame: dict[str, Any], call: CheckedChatRequest, replies: list[ChatReply]
    ) -> bytes:
        """See `Dialect`."""
        return to_json(await self._response(frame, call, replies[0]))

    def begin(self, frame: dict[str, Any], call: CheckedChatRequest) -> bytes:
        """See `Dialect`."""
        self._frame, self._call = frame, call
        self._thoughts, self._sent, self._items = Thoughts(), 0, 0
        self._open: Kind | None = None
        begun = self._about(frame) | {"status": "in_progress", "output": [], "usage": None}
        begun |= {"incomplete_details": None}
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=begun) for kind in kinds)

    def delta(self, index: int, piece: ChatDelta) -> bytes:
        """See `Dialect`. Tool calls, which are whole, come at the end, after all of the text."""
        return self._said(self._thoughts.feed(piece.content))

    async def end(self, index: int, reply: ChatReply) -> bytes:
        """See `Dialect`."""
        events = [self._said(self._thoughts.rest())]
        response = await self._response(self._frame, self._call, reply)
        output: list[dict[str, Any]] = response["output"]
        # What is open is the last one that is no call.
        if self._open is not None:
            events.append(self._stop(output[self._items]))
        for item in output[self._items :]:
            if item["type"] == "function_call":
                whole = item["arguments"]
                where = {"item_id": item["id"], "output_index": self._items}
                empty = item | {"arguments": "", "status": "in_progress"}
                made = "response.function_call_arguments"
                events += [
                    self._event("response.output_item.added", output_index=self._items, item=empty),
                    self._event(f"{made}.delta", **where, delta=whole),
                    self._event(f"{made}.done", **where, name=item["name"], arguments=whole),
                    self._event("response.output_item.done", output_index=self._items, item=item),
                ]
                self._items += 1
            else:  # a message without a text
                events += [self._start("text"), self._stop(item)]
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def refusal(self, error: RequestRefused) -> bytes:
        """See `Dialect`."""
        about = {name: error.body()["error"][name] for name in ("code", "message", "param")}
        return self._event("error", **about)

    def _about(self, frame: dict[str, Any]) -> dict[str, Any]:
        """The fields of a response that are known before its reply."""
        body = self._asked
        form = body.text.format if body.text is not None and body.text.format else None
        shown = form.model_dump(by_alias=True, exclude_none=True) if form else None
        if shown is not None and shown["type"] != "json_schema":
            shown = {"type": shown["type"]}
        tools = [one.model_dump() | {"strict": bool(one.strict)} for one in body.tools or ()]
        return {
            "id": frame["id"],
            "object": "response",
            "created_at": frame["created"],
            "model": frame["model"],
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": shown or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p or 1.0,
            "truncation": "disabled",
            "background": False,
        }

    async def _response(
        self, frame: dict[str, Any], call: CheckedChatRequest, reply: ChatReply
    ) -> dict[str, Any]:
        thought, text = split(reply.content)
        output: list[dict[str, Any]] = []
        if thought is not None:
            parts = [{"type": "reasoning_text", "text": thought}]
            output.append(_item(frame, "thought", 0) | {"content": parts, "status": "completed"})
        if text or not reply.tool_calls:
            asked = call.body.logprobs
            # Unlike those of chat completions, bytes that are not known are none, not null.
            written = (await logprobs(reply)).replace(b'"bytes":null', b'"bytes":[]')
            said = from_json(written)["content"] if asked else []
            part = _part("text") | {"text": text, "logprobs": said}
            output.append(_item(frame, "text", len(output)) | {"content": [part]})
        for one in reply.tool_calls:
            name = {"call_id": one["id"], "name": one["function"]["name"]}
            arguments = {"arguments": one["function"]["arguments"], "status": "completed"}
            about = {"type": "function_call", "id": _id(frame, "fc", len(output))}
            output.append(about | name | arguments)
        cut = reply.finish_reason == "length"
        tokens = len(reply.prompt_token_ids), len(reply.token_ids)
        return self._about(frame) | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": tokens[0],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": tokens[1],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": sum(tokens),
            },
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1} | fields)

    def _where(self, kind: Kind) -> dict[str, Any]:
        item = _item(self._frame, kind, self._items)
        return {"item_id": item["id"], "output_index": self._items, "content_index": 0}

    def _said(self, pieces: list[tuple[Kind, str]]) -> bytes:
        events: list[bytes] = []
        for kind, text in pieces:
            if kind != self._open:
                if self._open is not None:  # the thought is whole
                    item = _item(self._frame, "thought", self._items)
                    part = {"type": "reasoning_text", "text": self._text}
                    events.append(self._stop(item | {"content": [part], "status": "completed"}))
                events.append(self._start(kind))
            if text:
                self._text += text
                more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
                name = f"response.{_part(kind)['type']}.delta"
                events.append(self._event(name, **self._where(kind), delta=text, **more))
        return b"".join(events)

    def _start(self, kind: Kind) -> bytes:
        self._open, self._text = kind, ""
        item = _item(self._frame, kind, self._items) | {"status": "in_progress", "content": []}
        added = self._event("response.output_item.added", output_index=self._items, item=item)
        where = self._where(kind)
        return added + self._event("response.content_part.added", **where, part=_part(kind))

    def _stop(self, item: dict[str, Any]) -> bytes:
        """End the item that is open, which is `item`."""
        assert self._open is not None
        [part] = item["content"]
        where = self._where(self._open)
        more = {"logprobs": part["logprobs"]} if self._open == "text" else {}
        events = [
            self._event(f"response.{part['type']}.done", **where, text=part["text"], **more),
            self._event("response.content_part.done", **where, part=part),
            self._event("response.output_item.done", output_index=self._items, item=item),
        ]
        self._open, self._items = None, self._items + 1
        return b"".join(events)


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """The messages of chat completions: what the model said, thought and called in a row is one."""
    messages: list[dict[str, Any]] = []
    reply: dict[str, Any] | None = None  # the one that the next item may belong to
    for item in items:
        if isinstance(item, _FunctionOutput):
            output = content_of(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            reply = None
            continue
        if isinstance(item, _Message) and item.role != "assistant":
            messages.append({"role": item.role, "content": content_of(item.content)})
            reply = None
            continue
        if reply is None or not (
            isinstance(item, _FunctionCall)
            or (isinstance(item, _Message) and reply["content"].endswith(END) and len(reply) == 2)
        ):
            messages.append(reply := {"role": "assistant", "content": ""})
        if isinstance(item, _FunctionCall):
            call = tool_call(item.call_id, item.name, item.arguments)
            reply.setdefault("tool_calls", []).append(call)
        elif isinstance(item, _Reasoning):
            if item.content is None:
                raise InvalidRequest(
                    "input: got an item of type 'reasoning' without its content, expected the item "
                    "as this server gave it; leave out those of other models",
                    param="input",
                )
            reply["content"] += f"{BEGIN}{_text(item.content)}{END}"
        else:
            reply["content"] += _text(item.content)
    return messages


def _text(content: str | list[_Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: _Tool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_tool_choice(one) for one in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": choice | {"tools": tools}}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _response_format(form: _Format) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": form.type, "json_schema": {n: v for n, v in schema.items() if v is not None}}


def _id(frame: dict[str, Any], kind: str, index: int) -> str:
    return f"{kind}_{frame['id'].partition('_')[2]}_{index}"


def _item(frame: dict[str, Any], kind: Kind, index: int) -> dict[str, Any]:
    """An item without its content."""
    if kind == "thought":
        return {"type": "reasoning", "id": _id(frame, "rs", index), "summary": []}
    about = {"type": "message", "id": _id(frame, "msg", index), "role": "assistant"}
    return about | {"status": "completed"}


def _part(kind: Kind) -> dict[str, Any]:
    if kind == "thought":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

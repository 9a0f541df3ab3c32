"""Structured output: schemas as OpenAI's ``response_format``, and parsers of the replies.

The OpenAI SDK's parser is not used: it raises on a truncated reply and discards it. Such a reply is
a sample that training still has to score.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any, TypeGuard, cast

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.tools.base import create_schema_from_function
from langchain_core.utils.function_calling import convert_to_openai_function, convert_to_openai_tool
from langchain_core.utils.json import parse_json_markdown
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from langchain_art.errors import ConfigError

#: References to definitions, in a schema as JSON.
_REFERENCE = re.compile(r'"\$ref": "#/\$defs/([^"/]+)"')
#: What a function's name and description say of its schema.
_TOLD_ELSEWHERE = ("title", "description", "$ref")
_FORMATS = ("json_schema", "json_object", "text")


def is_legacy(schema: Any) -> bool:
    """True if `schema` is a class of pydantic 1, which only tool calls can express."""
    return isinstance(schema, type) and is_basemodel_subclass(schema) and not _is_model(schema)


def response_format(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Any schema that LangChain takes, or a finished ``response_format``, as a dict."""
    if isinstance(schema, dict):
        given = cast("dict[str, Any]", schema)
        if given.get("type") in _FORMATS:
            return given
        if {"name", "schema"} <= given.keys():
            return {"type": "json_schema", "json_schema": given}
        if "title" in given and "properties" not in given:  # LangChain would drop what there is
            schema = {"name": given["title"], "parameters": _parameters(given)}
    function = openai_tool(schema, strict=strict)["function"]
    named: dict[str, Any] = {"name": function["name"], "schema": function.get("parameters", {})}
    if strict is not None:
        named["strict"] = strict
    return {"type": "json_schema", "json_schema": named}


def openai_tool(tool: Any, *, strict: bool | None = None) -> dict[str, Any]:
    """Convert a tool as LangChain's `convert_to_openai_tool`, but with recursive schemas whole.

    LangChain replaces references by what they refer to, and by ``{}`` where that would not end.

    Raises:
        ConfigError: a TypedDict holds itself.
    """
    try:
        found = convert_to_openai_tool(tool, strict=strict)
    except RecursionError as error:
        raise ConfigError(
            f"got the TypedDict {getattr(tool, '__name__', '')!r}, which holds itself, expected a "
            "schema that LangChain can convert: make it a class of pydantic"
        ) from error
    whole = _json_schema(tool) if "{}" in str(found) else {}
    if _is_recursive(whole):
        function = {**found["function"], "parameters": _parameters(whole)}
        found["function"] = convert_to_openai_function(function, strict=strict)
    return found


def _parameters(whole: dict[str, Any]) -> dict[str, Any]:
    """A schema without what a function says elsewhere; a root that is a reference is resolved."""
    known = {**whole.get("definitions", {}), **whole.get("$defs", {})}
    root = known.get(str(whole.get("$ref")).rpartition("/")[2], {})
    return {k: v for k, v in {**whole, **root}.items() if k not in _TOLD_ELSEWHERE}


def _json_schema(tool: Any) -> dict[str, Any]:
    if isinstance(tool, BaseTool):
        tool = tool.tool_call_schema
        if isinstance(tool, dict):
            return cast("dict[str, Any]", tool)
    elif inspect.isroutine(tool):
        tool = create_schema_from_function(
            tool.__name__, tool, filter_args=(), parse_docstring=True, include_injected=False
        )
    return tool.model_json_schema() if _is_model(tool) else {}


def _is_recursive(schema: dict[str, Any]) -> bool:
    within = {
        name: set(_REFERENCE.findall(json.dumps(told)))
        for name, told in schema.get("$defs", {}).items()
    }
    for name in within:
        reached, left = set[str](), [name]
        while left:
            new = within.get(left.pop(), set()) - reached
            reached |= new
            left += new
        if name in reached:
            return True
    return False


class _JsonParser(JsonOutputParser):
    """A parser of JSON replies to dicts; None of one that calls tools instead."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        reply = result[0].message if isinstance(result[0], ChatGeneration) else None
        if isinstance(reply, AIMessage) and reply.tool_calls:
            return None
        return super().parse_result(result, partial=partial)


class _ModelParser(_JsonParser, PydanticOutputParser[Any]):
    pass


def parser_of(schema: Any) -> Runnable[Any, Any]:
    """A parser of JSON replies: to instances of a pydantic class, or to dicts.

    A reply that calls tools gives None, as with LangChain's own parser.
    """
    return _ModelParser(pydantic_object=schema) if _is_model(schema) else _JsonParser()


def parsed(
    model: Runnable[LanguageModelInput, AIMessage], parser: Runnable[Any, Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`model`, followed by `parser`; a reply that was cut off raises OutputParserException."""
    parser = RunnableGenerator(_whole, _awhole) | parser
    if not include_raw:
        return model | parser
    valid = RunnablePassthrough[Any].assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    invalid = RunnablePassthrough[Any].assign(parsed=lambda _: None)
    return RunnableMap[Any](raw=model) | valid.with_fallbacks(
        [invalid], exception_key="parsing_error"
    )


def _whole(parts: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """A reply in its parts; raises at the end if it was cut off, which a parser would not say."""
    reply: Any = None
    for part in parts:
        reply = part if reply is None else reply + part
        yield part
    _refuse_cut(reply)


async def _awhole(parts: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    reply: Any = None
    async for part in parts:
        reply = part if reply is None else reply + part
        yield part
    _refuse_cut(reply)


def _refuse_cut(reply: AIMessage | None) -> None:
    if reply is None or reply.response_metadata.get("finish_reason") != "length":
        return
    calls = [call["args"] for call in getattr(reply, "tool_call_chunks", ())]
    if reply.tool_calls and not calls:
        return
    try:
        for text in calls or [reply.text]:
            parse_json_markdown(text or "", parser=json.loads)
    except ValueError as error:
        usage = reply.usage_metadata
        at = f" at {usage['output_tokens']} tokens" if usage else ""
        raise OutputParserException(
            f"the reply was cut off{at}, before its JSON was complete: max_tokens, or the end of "
            "the model's context. Raise max_tokens, or ask for less",
            llm_output=reply.text,
        ) from error


def _is_model(schema: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(schema, type) and issubclass(schema, BaseModel)

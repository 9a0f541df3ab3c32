"""Structured output: schemas as OpenAI's ``response_format``, and parsers of the replies.

The OpenAI SDK's parser is not used: it raises on a truncated reply and discards it. Such a reply is
a sample that training still has to score.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, TypeGuard, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_function
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

_FORMATS = ("json_schema", "json_object", "text")


def is_legacy(schema: Any) -> bool:
    """Whether `schema` is a class of pydantic 1, which only tool calls can express."""
    return isinstance(schema, type) and is_basemodel_subclass(schema) and not _is_model(schema)


def response_format(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Any schema that LangChain takes, or a finished ``response_format``, as a dict."""
    if isinstance(schema, dict):
        given = cast("dict[str, Any]", schema)
        if given.get("type") in _FORMATS:
            return given
        if {"name", "schema"} <= given.keys():
            return {"type": "json_schema", "json_schema": given}
    function = convert_to_openai_function(schema, strict=strict)
    named: dict[str, Any] = {"name": function["name"], "schema": function.get("parameters", {})}
    if strict is not None:
        named["strict"] = strict
    return {"type": "json_schema", "json_schema": named}


def parsed(
    model: Runnable[LanguageModelInput, AIMessage], schema: Any, *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`model`, followed by a parser of `schema`: to its instances, or to dicts."""
    parser: Runnable[Any, Any] = JsonOutputParser()
    if _is_model(schema):
        parser = PydanticOutputParser(pydantic_object=schema)
    if not include_raw:
        return model | parser
    valid = RunnablePassthrough[Any].assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    invalid = RunnablePassthrough[Any].assign(parsed=lambda _: None)
    return RunnableMap[Any](raw=model) | valid.with_fallbacks(
        [invalid], exception_key="parsing_error"
    )


def _is_model(schema: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(schema, type) and issubclass(schema, BaseModel)

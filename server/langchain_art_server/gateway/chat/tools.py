"""Tools in a chat request: those in the prompt, those that may be called, and earlier calls."""

from __future__ import annotations

from typing import Any, cast

from pydantic_core import from_json

from langchain_art.errors import InvalidRequest
from langchain_art_server.gateway.refusals import shown


def shown_tools(
    tools: list[dict[str, Any]], choice: str | dict[str, Any]
) -> tuple[list[dict[str, Any]], str | dict[str, Any]]:
    """The tools for the prompt, and `ChatRequest.tool_choice`.

    With OpenAI's ``allowed_tools``, only those are in the prompt.

    Raises:
        InvalidRequest: a tool that is not in the request, or an unknown form of the choice.
    """
    names = {_tool_name(index, tool) for index, tool in enumerate(tools)}
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise _choice(f"got {shown(choice)}, expected auto, none, required or an object")
        if choice == "required" and not names:
            raise _choice("got 'required' without tools")
        return tools, choice
    kind = choice.get("type")
    if kind == "function":
        _allowed(choice, names)
        return tools, choice
    if kind != "allowed_tools":
        raise _choice(f"got type {shown(kind)}, expected 'function' or 'allowed_tools'")
    allowed = choice.get("allowed_tools")
    wanted = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(wanted, list) or not wanted:
        expected = '{"allowed_tools": {"mode", "tools": […]}}'
        raise _choice(f"got {shown(choice)}, expected {expected}")
    if allowed.get("mode") not in ("auto", "required"):
        raise _choice(f"got mode {shown(allowed.get('mode'))}, expected 'auto' or 'required'")
    kept = {_allowed(one, names) for one in wanted}
    return [tool for tool in tools if tool["function"]["name"] in kept], allowed["mode"]


def _tool_name(index: int, tool: dict[str, Any]) -> str:
    if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise InvalidRequest(
            f'tools.{index}: got type {shown(tool.get("type"))}, expected "function" with a '
            "function object",
            param="tools",
        )
    if not isinstance(schema := tool["function"].get("parameters"), dict | None):
        raise InvalidRequest(
            f"tools.{index}.function.parameters: got {shown(schema)}, expected a JSON schema, "
            "which is an object",
            param="tools",
        )
    if name := _function(tool).get("name"):
        return name
    raise InvalidRequest(f"tools.{index}.function.name is missing", param="tools")


def _function(value: Any) -> dict[str, Any]:
    """The ``function`` of a tool, a choice or a call; empty if it is none or has no name."""
    function = value.get("function") if isinstance(value, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else {}


def _allowed(choice: Any, names: set[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise _choice(f"got {shown(name)}, expected one of the request's tools: {sorted(names)}")
    return name


def _choice(problem: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice: {problem}", param="tool_choice")


def check_calls(index: int, calls: Any) -> None:
    """Check the tool calls of message `index`. Raises InvalidRequest."""
    if not isinstance(calls, list):
        raise _malformed_call(index, calls)
    for call in cast(list[Any], calls):
        if not _function(call):
            raise _malformed_call(index, call)
        _check_arguments(index, call["function"].get("arguments"))


def _malformed_call(index: int, got: Any) -> InvalidRequest:
    return InvalidRequest(
        f"messages.{index}.tool_calls: got {shown(got)}, expected "
        '{"id", "type": "function", "function": {"name", "arguments"}}',
        param="messages",
    )


def _check_arguments(index: int, arguments: Any) -> None:
    problem = None
    try:
        parsed = from_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(parsed, dict):
            problem = f"got {shown(arguments)}"
    except ValueError as error:
        problem = f"got malformed JSON {shown(arguments)} ({error})"
    if problem:
        raise InvalidRequest(
            f"messages.{index}.tool_calls: {problem}, expected a JSON object as arguments. A model "
            "that wrote broken JSON can be answered with an error message instead of a replay "
            "(ChatART does so by itself).",
            param="messages",
        )

r"""What the rule-following model says: a pure function of the request.

A message can carry a script, as the conformance model reads them (`tests.conformance.suite
.scripts`)::

    Say hello twice. ⟦hello¦hello again⟧

Without a script the reply is what LangChain's standard tests expect of a helpful model: it calls
the first tool when a user asks, fills in schemas with what stands in the prompt, and else talks.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import ChatRequest
from tests.conformance.suite.scripts import PAST_END

_SCRIPT = re.compile("⟦(.*?)⟧", re.DOTALL)


def reply_to(request: ChatRequest) -> str:
    """The text of the reply, tool calls in Hermes' notation (``<tool_call>``)."""
    messages = request.messages
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            continue
        if found := _SCRIPT.search(text_of(messages[index])):
            said = sum(m["role"] == "assistant" for m in messages[index + 1 :])
            steps = found[1].split("¦")
            return _step(steps[said] if said < len(steps) else PAST_END, messages)
    return _helpful(request)


def note(request: ChatRequest, **drawn: Any) -> None:
    """Append a call that has ended to the file that ``RULE_JOURNAL`` names, as its engine knew it.

    A witness that neither the gateway nor the client has a hand in.
    """
    line = {"id": request.id, "adapter": request.adapter, "messages": request.messages} | drawn
    with Path(os.environ.get("RULE_JOURNAL", os.devnull)).open("a") as journal:
        journal.write(json.dumps(line) + "\n")


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str | None):
        return content or ""
    return "".join(part.get("text", "") for part in ([content] if "type" in content else content))


def _step(step: str, messages: list[dict[str, Any]]) -> str:
    for mark, meant in {"⁑1": "⟦", "⁑2": "¦", "⁑3": "⟧"}.items():
        step = step.replace(mark, meant)
    if step.startswith("⁑5"):
        raise InvalidRequest(step[2:].replace("⁑0", "⁑"))
    pieces = [piece.replace("⁑0", "⁑") for piece in step.split("⁑4")]
    return text_of(messages[-1]).join(pieces)


def _call(name: str, arguments: dict[str, Any]) -> str:
    body = f'{{"name": {json.dumps(name)}, "arguments": {_json(arguments)}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _helpful(request: ChatRequest) -> str:
    asked = next((text_of(m) for m in reversed(request.messages) if m["role"] == "user"), "")
    form = request.response_format or {}
    choice, tools = request.tool_choice, [tool["function"] for tool in request.tools]
    wanted = None
    asks = choice == "auto" and not form and request.messages[-1]["role"] == "user"
    if isinstance(choice, dict):
        wanted = next(t for t in tools if t["name"] == choice["function"]["name"])
    elif tools and (choice == "required" or asks):
        wanted = tools[0]
    if wanted is not None:
        schema = wanted.get("parameters") or {"type": "object"}
        return _call(wanted["name"], _fill(schema, asked, schema))
    if form.get("type") == "json_schema":
        schema = form["json_schema"]["schema"]
        return _json(_fill(schema, asked, schema))
    if form.get("type") == "json_object":
        return _json({"setup": "Why do cats sit on keyboards?", "punchline": "To be the type."})
    return f"You said {asked[:60]!r}, and I say hello there."


def _fill(schema: dict[str, Any], text: str, root: dict[str, Any]) -> Any:
    """A value that `schema` allows, made of what stands in `text`."""
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        return _fill(target, text, root)
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return _fill(schema[choice][0], text, root)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    quoted = re.findall(r"['\"]([^'\"]+)['\"]", text)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        return {k: _fill(v, text, root) for k, v in schema.get("properties", {}).items()}
    if kind == "array":
        return [_fill(schema.get("items", {"type": "string"}), text, root)]
    plain: dict[str, Any] = {
        "integer": int(float(numbers[0])) if numbers else 0,
        "number": float(numbers[0]) if numbers else 0.5,
        "boolean": True,
        "null": None,
    }
    return plain.get(kind, quoted[0] if quoted else "cats")

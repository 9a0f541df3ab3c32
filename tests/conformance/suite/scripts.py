r"""What a prompt tells the conformance model to say (`tests.conformance.suite.model`).

A script stands in a message's text as ``⟦step¦step⟧``, each step being the text of a reply as the
model writes it, tool calls in Hermes' notation. The first script of the newest message that is not
the model's own and has one leads: reply number k after it is step k, and past the last step the
model says `PAST_END`. Without any script it says `UNSCRIPTED`.

Inside of a step, ``⁑0 ⁑1 ⁑2 ⁑3`` stand for ``⁑ ⟦ ¦ ⟧``, so that a step may quote scripts;
``⁑4`` stands for the content of the last message, and a step that begins with ``⁑5`` is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

PAST_END = "done"
UNSCRIPTED = "I have no script."

_ESCAPES = {"⁑": "⁑0", "⟦": "⁑1", "¦": "⁑2", "⟧": "⁑3"}
_KEYS = {"say", "call", "args", "calls", "error"}


def script(*steps: str | Mapping[str, Any], intro: str = "") -> str:
    """A message's text with a script in it.

    Args:
        steps: each a text, or a mapping with any of ``say`` (text), ``call`` and ``args`` (one
            tool call), ``calls`` (a list of those), or ``error`` alone: the chat template raises
            it, which servers answer with HTTP status 400. ``{last}`` in a text stands for the
            content of the request's last message.
        intro: text before the script.

    Raises:
        ValueError: there is no step, or one has other keys.
    """
    if not steps:
        raise ValueError("got a script without steps, expected at least one, such as 'hello'.")
    return f"{intro} ⟦{'¦'.join(map(_written, steps))}⟧".strip()


def _written(step: str | Mapping[str, Any]) -> str:
    given = {"say": step} if isinstance(step, str) else dict(step)
    unknown = given.keys() - _KEYS
    if unknown or not given or ("error" in given and len(given) > 1):
        raise ValueError(
            f"got the step {given!r}, expected a text, or a mapping with some of 'say', 'call' "
            "and 'args', 'calls', or with 'error' alone."
        )
    if "error" in given:
        return "⁑5" + _escaped(given["error"])
    calls = [given] if "call" in given else cast("Sequence[Any]", given.get("calls", ()))
    said = _escaped(given.get("say", "")).replace("{last}", "⁑4")
    return "\n".join([said] * bool(said) + [_escaped(_call(one)) for one in calls])


def _call(call: Mapping[str, Any]) -> str:
    name, arguments = (
        json.dumps(value, ensure_ascii=False) for value in (call["call"], call.get("args", {}))
    )
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _escaped(text: str) -> str:
    return text.translate(str.maketrans(_ESCAPES))

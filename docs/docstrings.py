"""The API reference: literal blocks (``::``) become fenced ones, and endpoints return answers."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LITERAL = re.compile(
    r"^(?P<indent>[ ]*)(?:\.\. code-block:: (?P<language>\w+)|(?P<text>\S.*?)::)[ ]*\n"
    r"(?P<code>(?:[ ]*\n|(?P=indent)[ ]{2,}\S.*\n?)+)",
    re.MULTILINE,
)


def fenced(docstring: str) -> str:
    """The docstring with its literal blocks fenced, as Python unless they name a language."""

    def fence(found: re.Match[str]) -> str:
        indent, lines = found["indent"], found["code"].strip("\n").splitlines()
        depth = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        code = "\n".join(indent + line[depth:] if line.strip() else "" for line in lines)
        lead = f"{indent}{found['text']}:\n\n" if found["text"] else ""
        return f"{lead}{indent}```{found['language'] or 'python'}\n{code}\n{indent}```\n\n"

    return _LITERAL.sub(fence, docstring + "\n").rstrip()


class Readable(griffe.Extension):
    """Fences the literal blocks of every docstring, and shows what a client's endpoint returns."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites an object's docstring as soon as it is read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Shows of an endpoint's ``Request[T]`` or ``Flow[T]`` the T that `ArtClient` returns."""
        if any(str(one.value) == "endpoint" for one in func.decorators):
            assert isinstance(func.returns, griffe.ExprSubscript)
            func.returns = func.returns.slice

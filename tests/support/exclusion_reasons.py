"""Every reason by which the server excludes from training, read from its code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import TypeGuard

from tests.support.live_server import REPO

ROOMS = (REPO / "server" / "langchain_art_server", REPO / "langchain_art" / "credit")
_WHOLE = re.compile(r"(groups|runs|calls)\.[a-z_]+")
_WORD = re.compile(r"[a-z]+(_[a-z]+)*_?")
_DECIDES = {"why_excluded", "_why_excluded", "why_too_long"}


@cache
def sent_reasons() -> frozenset[str]:
    """Keys that `TrainResult.excluded` may have, with the unit in front."""
    found = {"groups.unjudged"}  # the client's own
    for path in (path for room in ROOMS for path in room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if _WHOLE.fullmatch(node.value) else set()
            found |= {f"calls.{word}" for word in _of_calls(node)}
    assert "calls.superseded_" in found
    found |= {f"calls.superseded_{why}" for why in _by_the_graph()}
    return frozenset(found - {"calls.superseded_"})


def _of_calls(node: ast.AST) -> Iterator[str]:
    """Reasons of single calls: what the deciding functions return, and what is set as one."""
    values: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef) and node.name in _DECIDES:
        values += [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
    elif _sets_reason(node):
        values.append(node.value)
    for value in filter(None, values):
        texts = [value] if isinstance(value, ast.Constant | ast.JoinedStr) else []
        texts += [value.body, value.orelse] if isinstance(value, ast.IfExp) else []
        for text in texts:
            head = text.values[0] if isinstance(text, ast.JoinedStr) else text
            if isinstance(head, ast.Constant) and isinstance(head.value, str):
                word = head.value.partition(":")[0].replace(" ", "_")
                if _WORD.fullmatch(word):
                    yield word


def _sets_reason(node: ast.AST) -> TypeGuard[ast.keyword | ast.Assign]:
    if isinstance(node, ast.keyword):
        return node.arg == "excluded_because"
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(isinstance(one, ast.Name) and one.id == "excluded_because" for one in targets)


def _by_the_graph() -> list[str]:
    """Values of `Turn.excluded_because`, as its documentation lists them."""
    text = (REPO / "langchain_art" / "wire" / "trajectories.py").read_text()
    about = text.partition("    excluded_because: str | None = None\n")[2].partition('"""\n')[0]
    found = re.findall(r"``([a-z]+)``", about)
    assert len(found) == 4, about
    return found

"""What each framework's agent is asked, and how its program says what it got."""

import json
import sys
from contextlib import redirect_stdout
from importlib.metadata import version

from pydantic import BaseModel

#: Leads the model of the tests: it calls the tool `add`, then says the tool's result.
SUM = '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>¦The sum is ⁑4.⟧'
PERSON = "The name is 'Bob', age 7."


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Person(BaseModel):
    name: str
    age: int


def streamed(pieces):
    """The text of a stream, and whether it came in pieces."""
    pieces = [piece for piece in pieces if piece]
    return ["".join(pieces), len(pieces) > 1]


def report(distribution, answer, schema, stream, question=SUM):
    """For each PREFIX, one JSON line with what each feature gave.

    Args:
        distribution: the framework's, whose version is said.
        answer: (base_url, run, question, tools) -> the agent's answer.
        schema: (base_url, run) -> the fields of a `Person`.
        stream: (base_url, run) -> what `streamed` gives of `question`'s answer.
        question: leads the model through a call of `add`.
    """
    base_url, *prefixes = sys.argv[1:]
    for prefix in prefixes:
        with redirect_stdout(sys.stderr):  # what frameworks show of their agents
            got = {
                "tools": answer(base_url, f"{prefix}-tools", question, [add]),
                "schema": schema(base_url, f"{prefix}-schema"),
                "stream": stream(base_url, f"{prefix}-stream"),
            }
        print(json.dumps({"client": f"{distribution} {version(distribution)}", **got}))

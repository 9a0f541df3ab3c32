import pytest

from langchain_art.analytics.analysis import error_patterns, normalised
from langchain_art.wire import Trajectory, Turn


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        ("Timeout after 31 s at 'mail-7'", "Timeout after <n> s at <text>"),
        ('KeyError: "order-17"', "KeyError: <text>"),
        ("no file /home/ann/a.txt\n  here", "no file <path> here"),
        ("call_Ab12Cd34Ef failed at 0x7f3a91", "<id> failed at <id>"),
        ("run 3f2504e0-4f89-41d3-9a0c-0305e82c3301", "run <id>"),
        ("digest 9a0c0305e82c3301 differs", "digest <id> differs"),
        ("GET https://h.example/v1?k=3 gave 503", "GET <url> gave <n>"),
        ("got -1.5e-3, expected a word like added", "got <n>, expected a word like added"),
        ("api_key=abcdef123456 is wrong", "[redacted] is wrong"),
    ],
)
def test_what_differs_from_run_to_run_is_left_out(message: str, pattern: str) -> None:
    assert normalised(message) == pattern


def test_a_long_message_has_an_end() -> None:
    assert len(normalised("word " * 100)) == 161


def called(name: str, id_: str) -> dict[str, object]:
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(id_: str, text: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def test_errors_are_grouped_by_what_they_say() -> None:
    runs = [
        Trajectory(id="a", status="failed", error="ValueError: got 3"),
        Trajectory(
            id="b",
            error="ValueError: got 44",
            turns=(
                Turn(node="agent", reply=called("search", "c1")),
                Turn(node="agent", extends=0, messages=(result("c1", "Error: no mail 7"),)),
                # The whole prompt again, as of a summarising graph: the same result.
                Turn(node="sum", messages=(result("c1", "Error: no mail 7"),), error="429 from x"),
                Turn(
                    node="agent",
                    messages=(result("c2", "Error handling: errors are fine, and 0 Error: s"),),
                ),
            ),
        ),
    ]
    found = [
        (one.where, one.name, one.pattern, one.count, one.runs, one.example)
        for one in error_patterns(runs)
    ]
    assert found == [
        ("run", "-", "ValueError: got <n>", 2, 2, "a"),
        ("tool", "search", "Error: no mail <n>", 1, 1, "b"),
        ("call", "sum", "<n> from x", 1, 1, "b"),
    ]

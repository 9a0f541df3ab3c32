import json

import pytest
from langchain_core.messages import AIMessage

from langchain_art.evaluators.ruler.reply_parser import UnusableReply, read

IDS = ["bcd", "fgh", "jkm"]


def test_a_tool_call_is_the_verdict() -> None:
    entries = [{"id": one, "explanation": "", "score": n / 4} for n, one in enumerate(IDS)]
    called = {"name": "Verdict", "args": {"scores": entries}, "id": "1"}
    found = read(AIMessage("", tool_calls=[called]), IDS)
    assert {id_: score.value for id_, score in found.items()} == {"bcd": 0, "fgh": 0.25, "jkm": 0.5}
    with pytest.raises(UnusableReply):
        read(AIMessage(json.dumps({"scores": entries}), tool_calls=[called | {"args": {}}]), IDS)

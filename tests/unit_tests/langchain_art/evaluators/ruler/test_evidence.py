"""What a careful reader finds in the request is what the runs did: nothing is lost or misplaced."""

from __future__ import annotations

import pytest

from langchain_art import RulerEvaluator
from tests.support.judges.literal_judge import ScriptedJudge, asked_ids, verdict
from tests.support.judges.mail_groups import Case, Read, case, read_ours


def read(shown: Case, **options: int) -> dict[str, Read]:
    model = ScriptedJudge(answer=lambda request: verdict(dict.fromkeys(asked_ids(request), 0.5)))
    RulerEvaluator(model, passes=1, **options).invoke(shown.group)
    return {run.answer: run for run in read_ours(model.requests[0])}


@pytest.mark.parametrize("number", range(10))
def test_runs_of_several_turns_can_be_put_together_again(number: int) -> None:
    shown = case(number)
    runs = read(shown, output_tokens=100_000)
    for messages, quality in zip(shown.messages, shown.qualities, strict=True):
        one = runs[messages[-1]["content"]]
        calls = [call["function"] for m in messages for call in m.get("tool_calls", ())]
        results = [m["content"].replace("<", "&lt;") for m in messages if m["role"] == "tool"]
        assert list(one.calls) == [
            f"{call['name']} {call['arguments']}".replace("<", "&lt;") for call in calls
        ]
        assert list(one.results) == results
        assert one.evidence(shown.fact).quality == quality


def test_shortening_keeps_what_decides() -> None:
    """At the default cap at most one run in a hundred loses the line that bears its answer out."""
    lost = 0
    for number in range(25):
        shown = case(number)
        runs = read(shown)
        for messages, quality in zip(shown.messages, shown.qualities, strict=True):
            lost += runs[messages[-1]["content"]].evidence(shown.fact).quality != quality
    assert lost <= 2

"""Replies of kinds that a generator draws: none gives scores that it does not state.

``ART_TEST_SEED`` draws the same again; ``make soak`` draws 20,000.
"""

import random
from collections import Counter
from typing import Any

import pytest

from langchain_art import RulerEvaluator
from langchain_art.errors import JudgeError
from tests.support.judges.groups import group, run, says
from tests.support.judges.hostile_replies import Reply, drawn
from tests.support.judges.literal_judge import ScriptedJudge, parse
from tests.support.seeds import drawn_seed
from tests.support.soak import count


@pytest.mark.soak
def test_no_reply_gives_an_assignment_that_it_does_not_state() -> None:
    chance = random.Random(drawn_seed())
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(count(500, 20_000)):
        runs = [run(f"r{n}", says(f"answer {n}")) for n in range(chance.randint(2, 5))]
        replies: list[tuple[Reply, dict[str, str]]] = []

        def answer(request: str, replies: Any = replies) -> Any:
            shown = {name: text.strip() for name, text in parse(request).runs.items()}
            scores = chance.sample(range(1, 100), len(shown))
            entries = [
                {"id": name, "explanation": f"about {name}", "score": score / 100}
                for name, score in zip(shown, scores, strict=True)
            ]
            replies.append((drawn(entries, chance), shown))
            return replies[0][0].content

        evaluator = RulerEvaluator(ScriptedJudge(answer=answer), passes=1, attempts=1)
        found: dict[str, float | None] | None = None
        try:
            judged = evaluator.invoke(group(*runs))
            found = {f"answer {one.id[1:]}": one.reward for one in judged.trajectories}
        except JudgeError:
            pass
        ((reply, shown),) = replies
        stated = {shown[name]: score for name, score in (reply.stated or {}).items()}
        if (found is not None and found != stated) or (found is None and reply.plain):
            wrong.append(
                f"{number}: {reply.kind}: {found}, stated {stated}: {reply.content!r:.600}"
            )
        tally["read" if found is not None else "refused"] += 1
    assert not wrong, "\n".join(wrong[:10]) + f"\n{len(wrong)} in all"
    assert min(tally["read"], tally["refused"]) > sum(tally.values()) // 20, tally

"""A pytest fixture that scores outputs, and reports the scores of a failed test.

Enable it in ``conftest.py``::

    pytest_plugins = ["langchain_art.evaluators.integrations.pytest_plugin"]
"""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from langchain_art.evaluators.base import Score
from langchain_art.evaluators.functions import as_evaluator
from langchain_art.evaluators.integrations.convert import as_group, candidates
from langchain_art.evaluators.scoring import Evaluator


class ScoreOutputs(Protocol):
    """The type of the fixture `scored`."""

    def __call__(
        self, evaluator: Evaluator, outputs: Any, *, inputs: Any = None, reference: Any = None
    ) -> list[Score]:
        """Scores of `outputs`, in order; see `convert.candidates`.

        Raises:
            pytest.fail.Exception: an output could not be scored.
        """
        ...


@pytest.fixture
def scored(request: pytest.FixtureRequest) -> ScoreOutputs:
    """Scores outputs relative to each other.

    Scores are added to the test's properties (``--junit-xml``) and, with their explanations, to the
    report of a failed test. In a test that is marked ``langsmith`` they are logged as feedback.

    Example::

        def test_the_new_prompt_is_better(scored):
            old, new = scored(ruler, [ask_old(QUESTION), ask_new(QUESTION)], inputs=QUESTION)
            assert new.value > old.value
    """
    node = request.node
    in_langsmith = node.get_closest_marker("langsmith") is not None

    def score(
        evaluator: Evaluator, outputs: Any, *, inputs: Any = None, reference: Any = None
    ) -> list[Score]:
        judge = as_evaluator(evaluator)
        group = as_group(candidates(outputs), inputs=inputs, reference=reference)
        found: list[Score] = []
        for number, score in enumerate(judge.score(group), start=1):
            name = f"{judge.key}_{number}"
            if score is None:
                pytest.fail(f"{judge.key} could not score output {number}", pytrace=False)
            node.user_properties.append((name, score.value))
            node.add_report_section("call", "scores", f"{name} {score.value:g} {score.explanation}")
            if in_langsmith:
                _log(name, score)
            found.append(score)
        return found

    return score


def _log(name: str, score: Score) -> None:
    from langsmith import testing  # noqa: PLC0415 - only where a test asks for it

    testing.log_feedback(key=name, score=score.value, comment=score.explanation or None)

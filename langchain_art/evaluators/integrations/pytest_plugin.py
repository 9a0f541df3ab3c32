"""A pytest fixture that scores outputs, and reports the scores of a failed test.

Enable it in ``conftest.py``::

    pytest_plugins = ["langchain_art.evaluators.integrations.pytest_plugin"]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from langchain_art.evaluators.base import Score, as_evaluator
from langchain_art.evaluators.integrations.convert import as_group, candidates
from langchain_art.evaluators.scoring import Evaluator


@dataclass(frozen=True)
class ScoreOutputs:
    """The type of the fixture `scored`."""

    node: Any

    def __call__(
        self, evaluator: Evaluator, outputs: Any, *, inputs: Any = None, reference: Any = None
    ) -> list[Score]:
        """Scores of `outputs`, in order; see `convert.candidates`.

        Raises:
            pytest.fail.Exception: an output could not be scored.
        """
        judge = as_evaluator(evaluator)
        group = as_group(candidates(outputs), inputs=inputs, reference=reference)
        found: list[Score] = []
        for number, score in enumerate(judge.score(group), start=1):
            if score is None:
                pytest.fail(f"{judge.key} could not score output {number}", pytrace=False)
            self._report(f"{judge.key}_{number}", score)
            found.append(score)
        return found

    def _report(self, name: str, score: Score) -> None:
        words = f"{name} {score.value:g} {score.explanation}"
        self.node.user_properties.append((name, score.value))
        self.node.add_report_section("call", "scores", words)
        if self.node.get_closest_marker("langsmith") is not None:
            from langsmith import testing  # noqa: PLC0415 - only where a test asks for it

            testing.log_feedback(key=name, score=score.value, comment=score.explanation or None)


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
    return ScoreOutputs(request.node)

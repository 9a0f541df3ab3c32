import pytest

from langchain_art.training.report import Curve, all_alike, text_plot
from tests.support.fits import evaluation, record

STEPS = [record(n, n, n / 10) for n in range(1, 11)]
EVALS = [evaluation(0.0, 0), evaluation(0.9, 5), evaluation(1.0, 10)]


def test_a_curve_in_text() -> None:
    lines = text_plot([Curve("lr-1", STEPS, EVALS)], 60).splitlines()
    assert lines[0].startswith("    1.000 ┤") and lines[0].endswith("A"), "the last, on top"
    assert lines[14].startswith("    0.000 ┤A")
    assert lines[7].startswith("    0.500 ┤")
    assert lines[16].startswith("           0") and lines[16].endswith("step 10")
    assert lines[17] == (
        "lr-1: A held out 0.000 → 1.000, best 1.000 (p@10); a training 0.100 → 1.000"
    )
    assert max(map(len, lines[:17])) <= 60
    assert sum(line.count("a") for line in lines[:15]) == 9, "one lies below the last A"


def test_a_curve_may_be_flat_or_empty() -> None:
    assert "0.500" in text_plot([Curve("", [record(1, 1)], ())], 40)
    assert text_plot([Curve("x", [], ()), Curve("y", [record(1, 1, None)], ())], 40) == (
        "No rewards yet."
    )


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([0.0] * 8, "No run of 8 was rewarded"),
        ([1.0] * 8, "Every run of 8 has the full reward"),
        ([-1.0] * 8, "All 8 runs have the reward -1"),
        ([0.0] * 7 + [0.1], None),
        ([0.0] * 7, None),
        ([], None),
    ],
)
def test_runs_that_are_all_worth_the_same(rewards: list[float], words: str | None) -> None:
    warning = all_alike(rewards, len(rewards))
    assert warning is None if words is None else words in (warning or "")

"""``python -m examples.evaluate``: the example that it names, and the option ``--few-shot``."""

from __future__ import annotations

import sys

import pytest

from examples import evaluate


@pytest.mark.parametrize("given", [[], ["chess"], ["--help"]], ids=str)
def test_it_says_which_examples_there_are(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate", *given])
    with pytest.raises(SystemExit, match=r"expected of codenames, .*tic-tac-toe"):
        evaluate.main()


def test_an_example_that_knows_no_solutions_refuses_few_shot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["evaluate", "codenames", "--few-shot", "2"])
    with pytest.raises(SystemExit) as ended:
        evaluate.main()
    assert ended.value.code == 2
    assert "codenames has no solved scenarios to show" in capsys.readouterr().err

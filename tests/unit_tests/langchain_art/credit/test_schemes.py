"""A scheme of credit is one module that the config names: client, server and docs follow it."""

from typing import get_args

import pytest

from langchain_art.credit.candidates import steps
from langchain_art.credit.credit_assignment import group_credit
from langchain_art.credit.schemes import SCHEMES
from langchain_art.training.advantages import group_has_zero_variance
from langchain_art.wire import Credit, TrainConfig, Trajectory, TrajectoryGroup, Turn
from langchain_art.wire.choices import CreditKind, kinds
from tests.support.live_server import REPO
from tests.unit_tests.langchain_art.credit.test_credit_assignment import call, run


def test_the_kinds_of_the_settings_are_those_of_the_type_and_of_the_docs() -> None:
    assert kinds(get_args(Credit)[0]) == get_args(CreditKind) == tuple(SCHEMES)
    rows = (REPO / "docs/credit.md").read_text().partition("## Which credit")[2]
    table, _, formulas = rows.partition("## Which advantage")[0].partition("With `r_i`")
    for kind in SCHEMES:
        assert f"| `{kind}`" in table
        assert f"- **`{kind}`**:" in formulas


def test_the_client_asks_the_scheme_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of equal rewards teach something where a scheme compares them by something else."""
    two = TrajectoryGroup(
        id="g",
        trajectories=tuple(
            Trajectory(id=f"r{n}", reward=1.0, turns=(Turn(call_id=f"c{n}"),) * (n + 1))
            for n in range(2)
        ),
    )
    assert group_has_zero_variance(two, "p", TrainConfig(), {})
    by_length = lambda runs, credit, compared: [  # noqa: E731
        ({i: [(float(len(one.calls)), steps(runs, i))] for i, one in enumerate(runs)}, 1.0)
    ]
    monkeypatch.setitem(SCHEMES, "run", by_length)
    assert not group_has_zero_variance(two, "p", TrainConfig(), {})
    found = group_credit([run(1, call()), run(1, call(), call())], TrainConfig(advantage="mean"))
    assert found.advantages == {(0, 0): -0.5, (1, 0): 0.5, (1, 1): 0.5}

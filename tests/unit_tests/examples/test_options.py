import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from examples import evaluate
from examples.codenames import train as codenames
from examples.codenames.environment import LEVELS
from examples.support.command import Given, level_options
from examples.support.control import shuffled
from examples.support.demo import Setup
from langchain_art import Trajectory, TrajectoryGroup, Turn


def test_the_level_goes_to_the_build_and_to_the_folder() -> None:
    options = level_options(codenames.build_fit, LEVELS, "Size")
    given = Given(codenames.DEMO, 2, True, None, None)
    hard = options(given, level=3)
    assert hard["out"] == Path("out/demo-codenames-seed2-control-level3")
    assert hard["demo"].build.func is codenames.build_fit
    assert hard["demo"].build.keywords == {"level": 3}
    assert options(given)["out"] == Path("out/demo-codenames-seed2-control")


@pytest.mark.parametrize(
    "name", ["deep_research", "email_assistant", "temporal_clue", "twenty_forty_eight"]
)
def test_a_demo_is_built_with_scenarios_to_learn_from_and_others(name: str, tmp_path: Path) -> None:
    """Of those whose fits run in ``make soak``."""
    demo = replace(import_module(f"examples.{name}.train").DEMO, groups_per_step=3, held_out=2)
    fit = demo.build(Setup(demo, "http://localhost:1/v1", tmp_path, 2))
    train, held_out = ({one.id for one in part} for part in (fit.train, fit.held_out))
    assert (len(train), len(held_out), train & held_out) == (6, 2, set())
    fit.close()


def test_what_cannot_be_evaluated_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*given: str) -> str:
        monkeypatch.setattr(sys, "argv", ["evaluate", *given])
        with pytest.raises(SystemExit) as ended:
            evaluate.main()
        return capsys.readouterr().err or str(ended.value)

    monkeypatch.setenv("COLUMNS", "200")
    for given in ([], ["chess"], ["--help"]):
        assert re.search(r"expected of codenames, .*tic-tac-toe", said(*given))
    refused = said("codenames", "--few-shot", "2")
    assert "codenames has no solved scenarios to show" in refused
    monkeypatch.setattr("langchain_art.packages.find_spec", lambda _: None)
    assert re.search(r"codenames needs .*langgraph.*run: pip install", said("codenames"))


def turn(node: str, reward: float) -> Turn:
    return Turn(call_id=None, node=node, reply={"role": "assistant", "content": ""}, reward=reward)


async def test_rewards_are_dealt_out_within_the_group_and_the_node() -> None:
    runs = tuple(
        Trajectory(
            id=str(n), reward=float(n), turns=(turn("a", n), turn("a", 1), turn("b", 10 * n))
        )
        for n in range(8)
    )
    seen: set[tuple[float | None, ...]] = set()
    for number in range(4):
        group = TrajectoryGroup(id=str(number), trajectories=runs)
        dealt = (await shuffled(0)(group)).trajectories
        assert dealt == (await shuffled(0)(group)).trajectories
        assert sorted(run.reward or 0.0 for run in dealt) == [float(n) for n in range(8)]
        assert all(run.turns[0].reward is None for run in dealt)  # a node's last call has its sum
        for last, sums in ((1, range(1, 9)), (2, range(0, 80, 10))):
            assert sorted(run.turns[last].reward or 0.0 for run in dealt) == list(sums)
        seen.add(tuple(run.reward for run in dealt))
    assert len(seen) == 4 and tuple(run.reward for run in runs) not in seen

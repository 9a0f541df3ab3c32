import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_art.errors import ConfigError
from langchain_art.rollout.gather import gather_sync
from langchain_art.rollout.scenarios import (
    check_portable,
    check_scenarios,
    draw,
    load,
    rollout_name,
)
from tests.support import leased_agent


def test_batches_are_epochs_without_replacement_of_any_sequence() -> None:
    for scenarios in ([*range(10)], range(10), np.arange(10)):
        check_scenarios(scenarios, "scenarios")
        seen = [draw(scenarios, position, seed=1) for position in range(20)]
        assert sorted(seen[:10]) == sorted(seen[10:20]) == [*scenarios]
        assert seen[:10] != seen[10:20]
        assert [draw(scenarios, p, seed=2) for p in range(20)] != seen
    with pytest.raises(ConfigError, match=r"got str \('Who\?'\), expected a list of scenarios"):
        gather_sync(lambda _: 1.0, "Who?")


def test_a_function_of_a_module_has_the_name_that_finds_it() -> None:
    name = rollout_name(leased_agent.rollout)
    assert name == leased_agent.NAME
    assert load(name) is leased_agent.rollout
    assert rollout_name("my_agent:rollout") == "my_agent:rollout"
    assert rollout_name(Agent.of_all) == f"{__name__}:Agent.of_all"
    for wrong, words in (
        ("nowhere:rollout", "cannot be loaded"),
        (f"{leased_agent.__name__}:nothing", "cannot be loaded"),
        ("my_agent", "expected MODULE:NAME"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(wrong)


@pytest.mark.parametrize("argv", [["train.py"], ["-m", "train"]])
def test_a_function_of_the_program_that_was_started_is_named_by_its_file(
    argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "from langchain_art.rollout.scenarios import rollout_name\n"
        "def rollout(scenario): ...\n"
        "print(rollout_name(rollout))\n"
    )
    done = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "train:rollout\n", done.stderr


class Agent:
    def rollout(self, scenario: object) -> float:
        return 1.0

    @classmethod
    def of_all(cls, scenario: object) -> float:
        return 1.0


@pytest.mark.parametrize(
    "rollout", [lambda _: 1.0, partial(leased_agent.rollout), object(), Agent().rollout]
)
def test_what_no_other_process_finds_is_refused(rollout: Any) -> None:
    with pytest.raises(ConfigError, match="expected a function of a module: workers import it"):
        rollout_name(rollout)

    class Remote:
        assistant_id = "agent"

        def invoke(self) -> None: ...

    with pytest.raises(ConfigError, match="it runs on another machine already"):
        rollout_name(Remote())


def test_json_values_go_to_workers_and_others_are_refused_with_their_place() -> None:
    known = ["q", 1, 0.5, None, True, [1, "a"], {"a": {"b": [None]}}]
    check_portable(known, "train_scenarios")
    for other in ((1, 2), {1: "a"}, {"a": (1,)}, {"a"}, object(), float("nan"), b"a"):
        with pytest.raises(ConfigError, match=r"train_scenarios\[7\]: got .*, expected a JSON va"):
            check_portable([*known, other], "train_scenarios")

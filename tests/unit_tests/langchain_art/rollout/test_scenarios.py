from __future__ import annotations

import pytest

from langchain_art.errors import ConfigError
from langchain_art.rollout.gather import gather_sync
from langchain_art.rollout.scenarios import check_scenarios


def test_any_sequence_is_taken_as_it_is() -> None:
    for scenarios in ([], ["a"], ("a",), range(3)):
        check_scenarios(scenarios, "scenarios")


def test_a_text_is_no_sequence_of_scenarios() -> None:
    with pytest.raises(ConfigError, match=r"the text 'Who\?', expected a list of scenarios"):
        gather_sync(lambda _: 1.0, "Who?")

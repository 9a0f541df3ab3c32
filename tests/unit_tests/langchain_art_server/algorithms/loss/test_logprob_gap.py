import math
from typing import Any

import pytest
import torch

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.loss.logprob_gap import Suspect, check_sync, suspects_of

torch.set_num_threads(1)


def metrics(gap: float, worst: float = 0.5) -> dict[str, float]:
    return {"logprob_gap_mean": gap, "logprob_gap_max": worst}


def never() -> list[Suspect]:
    raise AssertionError("no suspects are wanted where nothing is wrong")


def test_the_bound_grows_by_itself_with_every_version() -> None:
    check_sync(metrics(0.29), 0.1, staleness=2.0, suspects=never)
    with pytest.raises(ArtError, match=r"0\.31 nats apart per token.*at most 0\.3.*staleness 2"):
        check_sync(metrics(0.31), 0.1, staleness=2.0)


def test_it_can_be_set_and_switched_off() -> None:
    with pytest.raises(ArtError, match=r"max_logprob_gap=0\.01"):
        check_sync(metrics(0.02), 0.01)
    check_sync(metrics(math.inf), None, suspects=never)
    with pytest.raises(ArtError):
        check_sync(metrics(math.inf), 0.1)


def test_the_best_explanation_is_named_if_it_explains_enough() -> None:
    suspects = [Suspect(0.3, "the dog"), Suspect(0.1, "the cat"), Suspect(math.inf, "nobody")]
    with pytest.raises(ArtError, match=r"the cat; 10\.0% of the distance.*Nothing was published"):
        check_sync(metrics(1.0), 0.1, suspects=lambda: suspects)
    with pytest.raises(ArtError, match="No usual fault"):
        check_sync(metrics(1.0), 0.1, suspects=lambda: [Suspect(0.6, "the dog")])


def suspects(**changes: Any) -> dict[str, float]:
    draw = torch.Generator().manual_seed(0)
    own_T, base_T, hot_T = (-3 * torch.rand(12, generator=draw) for _ in range(3))
    given: dict[str, Any] = {
        "own_T": own_T,
        "base_T": base_T,
        "at_temperatures": {0.5: own_T * 2, 0.7: hot_T},
        "sampler_logprobs_T": own_T,
        "calls_T": torch.tensor([1] * 5 + [2] * 7),
        "recorded": [1.0, 1.0],
    }
    for name, change in changes.items():
        given[name] = change(given)
    return {suspect.fault: suspect.left for suspect in suspects_of(**given)}


def test_calls_of_one_token_have_no_neighbours() -> None:
    found = suspects(
        sampler_logprobs_T=lambda g: g["own_T"].roll(1), calls_T=lambda _: torch.arange(12)
    )
    assert [left for fault, left in found.items() if "shifted" in fault] == [math.inf]

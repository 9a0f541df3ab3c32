import math

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


def test_calls_of_one_token_have_no_neighbours() -> None:
    own_T = -3 * torch.rand(12, generator=torch.Generator().manual_seed(0))
    found = suspects_of(
        own_T=own_T,
        base_T=own_T - 1,
        at_temperatures={0.5: own_T * 2},
        sampler_logprobs_T=own_T.roll(1),
        calls_T=torch.arange(12),
        recorded=[1.0],
    )
    assert [one.left for one in found if "shifted" in one.fault] == [math.inf]

import math

import pytest
import torch

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.loss.logprob_gap import check_sync, suspects_of


def test_the_bound_grows_by_itself_with_every_version() -> None:
    check_sync({"logprob_gap_mean": 0.29, "logprob_gap_max": 0.5}, 0.1, staleness=2.0)
    with pytest.raises(ArtError, match=r"0\.31 nats apart per token.*at most 0\.3.*staleness 2"):
        check_sync({"logprob_gap_mean": 0.31, "logprob_gap_max": 0.5}, 0.1, staleness=2.0)


def test_calls_of_one_token_have_no_neighbours() -> None:
    own_T = -3 * torch.rand(12)
    given = own_T, own_T + 1, {0.5: own_T * 2}, own_T.roll(1), torch.arange(12), [1.0]
    assert [one.left for one in suspects_of(*given) if "shifted" in one.fault] == [math.inf]

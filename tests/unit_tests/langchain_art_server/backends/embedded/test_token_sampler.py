import random

import pytest
import torch

from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.embedded.client_shares import ClientShares
from langchain_art_server.backends.embedded.token_sampler import (
    SamplingState,
    SequenceState,
    TokenSampler,
)

ROWS, VOCAB = 24, 49152


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.0), Sampling(top_logprobs=3)],
    ids=["plain", "colder", "greedy", "top"],
)
def test_logprobs_of_a_large_vocabulary_are_those_of_float64(sampling: Sampling) -> None:
    """The float32 softmax of torch is 1e-6 away from it, in one direction for a row's tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    exact = (logits.double() / (sampling.temperature or 1.0)).log_softmax(-1)
    states = [SamplingState(sampling, random.Random(row)) for row in range(ROWS)]
    sampled = TokenSampler(states, torch.device("cpu")).sample(logits.clone())
    drawn = exact.gather(1, sampled.ids[:, None]).squeeze(1)
    away = torch.tensor(sampled.logprobs, dtype=torch.float64) - drawn
    assert away.abs().mean() < 4e-7
    assert len(sampled.top) == (ROWS if sampling.top_logprobs else 0)
    for row, top in sampled.top.items():
        assert [token for token, _ in top] == exact[row].topk(3).indices.tolist()
        for token, logprob in top:
            assert abs(logprob - float(exact[row, token])) < 1e-6


def rows_of(client: str, count: int = 1) -> list[SequenceState]:
    state = SamplingState(Sampling(), random.Random(0))
    return [SequenceState([1, 2, 3], 9, state, client, filled=3) for _ in range(count)]


def test_the_servers_own_calls_are_no_client() -> None:
    """The check of a new version comes just before a fit's next rollouts."""
    shares, own, others = ClientShares(lambda: 0.0, linear=True), rows_of(""), rows_of("a", 100)
    for rows in (own, others, [*others, *own]):
        assert shares.begin(rows, set()) == "all" and not shares.shared


def test_between_two_calls_of_a_light_client_the_others_turns_stay_short() -> None:
    now = 0.0
    shares, light, others = ClientShares(lambda: now, linear=True), rows_of("b"), rows_of("a", 100)

    def turn(rows: list[SequenceState]) -> str:
        nonlocal now
        found, shares.computed = shares.begin(rows, set()), True
        now += 0.01
        return found

    assert {turn([*others, *light]) for _ in range(20)} == {"light", "heavy"}
    assert turn(others) == "heavy"
    assert [turn(others) for _ in range(60)][-1] == "all", "it has gone"

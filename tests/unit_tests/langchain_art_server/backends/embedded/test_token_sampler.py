import random

import pytest
import torch

from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.embedded.token_sampler import SamplingState, TokenSampler

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

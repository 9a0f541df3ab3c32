import pytest

from langchain_art.wire import (
    LoraConfig,
    PreferenceConfig,
    SFTConfig,
    TrainConfig,
    default_learning_rate,
    with_learning_rate,
)
from langchain_art.wire.policies import logprob_tolerance

SHAPE = LoraConfig()


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(0.2e6, 2.4e-3), (1e9, 5e-5), (9e9, 5e-5), (4e11, 5e-5), (135e6, 1.24e-4), (10e6, 4.05e-4)],
)
def test_the_default_is_that_of_the_models_size(parameters: float, rate: float) -> None:
    assert default_learning_rate(int(parameters), SHAPE) == pytest.approx(rate, rel=0.02)


def test_a_larger_model_never_learns_faster_and_no_default_is_above_its_bound() -> None:
    rates = [default_learning_rate(10**n, SHAPE) for n in range(13)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 3e-2 and rates[-1] == pytest.approx(5e-5)


def test_alpha_over_rank_divides_it_and_the_rank_alone_does_not_matter() -> None:
    at = 10**9
    assert default_learning_rate(at, LoraConfig(rank=64, alpha=128.0)) == pytest.approx(5e-5)
    assert default_learning_rate(at, LoraConfig(rank=16, alpha=16.0)) == pytest.approx(1e-4)
    assert default_learning_rate(at, LoraConfig(rank=8, alpha=32.0)) == pytest.approx(2.5e-5)


def test_a_config_that_names_a_rate_keeps_it() -> None:
    for config in (TrainConfig(learning_rate=1e-4), SFTConfig(learning_rate=1e-4)):
        assert with_learning_rate(config, 10**9, SHAPE) is config
    preference = PreferenceConfig()
    assert with_learning_rate(preference, 10**9, SHAPE) is preference


def test_a_config_without_one_gets_that_of_its_kind() -> None:
    by_reward = with_learning_rate(TrainConfig(loss="gspo"), 10**9, SHAPE)
    assert by_reward == TrainConfig(loss="gspo", learning_rate=by_reward.learning_rate)
    assert by_reward.learning_rate == pytest.approx(5e-5)
    assert with_learning_rate(SFTConfig(), 10**9, SHAPE).learning_rate == pytest.approx(2.5e-4)
    assert '"learning_rate"' in by_reward.model_dump_json(exclude_unset=True)


@pytest.mark.parametrize(
    ("dtype", "nats"),
    [("float64", 0.0001), ("float32", 0.0001), ("bfloat16", 0.05), ("float16", 0.01)],
)
def test_half_precision_rounds_coarsely(dtype: str, nats: float) -> None:
    assert logprob_tolerance(dtype) == nats

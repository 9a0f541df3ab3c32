import pytest

from langchain_art.wire import (
    LoraConfig,
    PreferenceConfig,
    SFTConfig,
    TrainConfig,
    default_learning_rate,
    with_learning_rate,
)

SHAPE = LoraConfig()


def test_a_larger_model_never_learns_faster_and_no_default_is_above_its_bound() -> None:
    for parameters, rate in ((0.2e6, 2.4e-3), (10e6, 4.05e-4), (135e6, 1.24e-4), (9e9, 5e-5)):
        assert default_learning_rate(int(parameters), SHAPE) == pytest.approx(rate, rel=0.02)
    rates = [default_learning_rate(10**n, SHAPE) for n in range(13)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 3e-2 and rates[-1] == pytest.approx(5e-5)


def test_alpha_over_rank_divides_it_and_the_rank_alone_does_not_matter() -> None:
    at = 10**9
    assert default_learning_rate(at, LoraConfig(rank=64, alpha=128.0)) == pytest.approx(5e-5)
    assert default_learning_rate(at, LoraConfig(rank=16, alpha=16.0)) == pytest.approx(1e-4)
    assert default_learning_rate(at, LoraConfig(rank=8, alpha=32.0)) == pytest.approx(2.5e-5)


def test_a_config_without_a_rate_gets_that_of_its_kind() -> None:
    for config in (TrainConfig(learning_rate=1e-4), PreferenceConfig()):
        assert with_learning_rate(config, 10**9, SHAPE) is config
    by_reward = with_learning_rate(TrainConfig(loss="gspo"), 10**9, SHAPE)
    assert by_reward == TrainConfig(loss="gspo", learning_rate=by_reward.learning_rate)
    assert by_reward.learning_rate == pytest.approx(5e-5)
    assert with_learning_rate(SFTConfig(), 10**9, SHAPE).learning_rate == pytest.approx(2.5e-4)
    assert '"learning_rate"' in by_reward.model_dump_json(exclude_unset=True)

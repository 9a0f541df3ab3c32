import json
import math
import re
from typing import Any

import pytest
from pydantic import ValidationError

from langchain_art.errors import ConfigError
from langchain_art.wire import (
    CISPO,
    DPPOTV,
    GSPO,
    AnchorCredit,
    ClippedRatio,
    ConstantAggregation,
    IcePop,
    KLPenalty,
    LoraConfig,
    LRSchedule,
    OverlongPenalty,
    PolicySpec,
    PreferenceConfig,
    SequenceMask,
    SFTConfig,
    SimpleAdvantage,
    SimpleCredit,
    Standardized,
    TrainConfig,
    TrainRequest,
    TruncatedIS,
    TurnCredit,
    default_learning_rate,
    with_learning_rate,
)
from langchain_art.wire.field_hints import in_words
from langchain_art.wire.policies import logprob_tolerance
from langchain_art_server.gateway.chat.request import ChatBody
from langchain_art_server.gateway.refusals import refuse


def test_the_string_of_a_kind_is_that_kind_with_its_defaults() -> None:
    groups: dict[str, tuple[Any, ...]] = {
        "loss": (ClippedRatio(), GSPO(), CISPO(), DPPOTV()),
        "advantage": (SimpleAdvantage(kind="maxrl"), Standardized()),
        "credit": (SimpleCredit(kind="node"), TurnCredit(), AnchorCredit()),
    }
    for field, group in [(field, one) for field, some in groups.items() for one in some]:
        for given in (group, group.kind, group.model_dump()):
            assert getattr(TrainConfig(**{field: given}), field) == group
    for sampling in (TruncatedIS(), IcePop(), SequenceMask()):
        assert GSPO(importance_sampling=sampling.kind).importance_sampling == sampling


FULL = TrainConfig(
    learning_rate=1e-3,
    schedule=LRSchedule(warmup_steps=2, decay_steps=9, final_fraction=0.2),
    advantage="standardized",
    credit=AnchorCredit(weight=2.0),
    overlong=OverlongPenalty(tokens=8, buffer=8),
    loss=CISPO(importance_sampling=IcePop(), aggregation=ConstantAggregation(value=5.0)),
    kl=KLPenalty(estimator="k3", coefficient=0.1),
    guard=None,
)


PREFERENCE = PreferenceConfig(
    beta=0.3,
    learning_rate=1e-3,
    schedule=LRSchedule(warmup_steps=2),
    max_grad_norm=0.5,
    tokens_per_microbatch=512,
)


@pytest.mark.parametrize(
    "config", [TrainConfig(), SFTConfig(), SFTConfig(learning_rate=1e-3), FULL, PREFERENCE]
)
def test_a_config_is_the_same_after_the_wire(config: Any) -> None:
    request = TrainRequest(policy="p", groups=(("a", "b"),), config=config)
    for sent in (request.model_dump_json(), request.model_dump_json(exclude_unset=True)):
        assert TrainRequest.model_validate_json(sent).config == config


def test_a_config_without_a_kind_is_one_of_reinforcement_learning() -> None:
    body = {"policy": "p", "groups": [["a"]], "config": {"loss": "gspo"}}
    found = TrainRequest.model_validate_json(json.dumps(body)).config
    assert found == TrainConfig(loss="gspo")
    with pytest.raises(ValidationError, match="'rl', 'sft', 'dpo'"):
        TrainRequest.model_validate(body | {"config": {"kind": "ppo"}})


LONG, BY_SCORES = OverlongPenalty(tokens=8, buffer=4), Standardized(scores={"a": 1.0})
ADVANTAGES = "'mean', 'leave_one_out', 'maxrl', 'batch_standardized', 'standardized'"
BLIND = {"teacher": "a@1", "rewards": False}
K2 = {"estimator": "k2", "coefficient": 0.1}


def weighed(kind: str, **options: float | None) -> dict[str, Any]:
    return {"loss": {"kind": "clip", "importance_sampling": {"kind": kind} | options}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": {"decay_steps": 3, "warmup_steps": 3}}, "decay_steps to be the larger"),
        ({"loss": {"kind": "clip", "dual_clip": 1.0}}, "greater than 1"),
        ({"loss": {"kind": "gspo", "dual_clip": 3.0}}, r"loss\.dual_clip: this option"),
        ({"loss": {"kind": "dppo_tv", "clip_high": 1.0}}, "less than 1"),
        ({"loss": {"kind": "dppo_tv", "importance_sampling": None}}, "is not known here"),
        ({"loss": 3}, "valid dictionary or object"),
        ({"loss": {"clip_low": 0.1}}, "discriminator 'kind'"),
        ({"advantage": "rloo"}, ADVANTAGES),
        ({"distillation": {"teacher": "solver"}}, "expected 'policy@version', as in 'solver@7'"),
        ({"distillation": {"teacher": "a@1"}, "kl": K2}, "got kl and distillation"),
        ({"distillation": BLIND, "credit": "node"}, "where no reward is read"),
        ({"credit": "step"}, "'run', 'node', 'call', 'turn', 'anchor'"),
        ({"kl": {"estimator": "k3"}}, "kl.coefficient: Field required"),
        ({"kl": {"coefficient": 0.1}}, "kl.estimator: Field required"),
        ({"kl": {"estimator": "k3", "coefficient": 0.0}}, "greater than 0"),
        ({"kl": {"estimator": "k4", "coefficient": 0.1}}, "'k1', 'k2' or 'k3'"),
        ({"loss": {"kind": "clip", "aggregation": "mean"}}, "'token', 'sequence' or 'run'"),
        ({"loss": {"kind": "clip", "aggregation": "constant"}}, "aggregation"),
        ({"loss": {"kind": "clip", "aggregation": {"kind": "constant"}}}, "Field required"),
        ({"loss": {"kind": "clip", "aggregation": {"value": 0.0}}}, "equal to 0.000001"),
        (weighed("truncated", low=0.5), r"importance_sampling\.low: this option is not known"),
        (weighed("truncated", high=None), "valid number"),
        (weighed("icepop", low=None), "valid number"),
        (weighed("truncated", high=1.0), "greater than 1"),
        ({"loss": {"kind": "clip", "importance_sampling": "off"}}, "'truncated', 'icepop'"),
        ({"guard": 1.0}, "greater than 1"),
        ({"guard": 0.9}, "greater than 1"),
        ({"max_logprob_gap": 0.0}, "greater than 0"),
        ({"credit": {"kind": "run", "discount": 0.9}}, "is not known here"),
        ({"credit": {"kind": "node", "discount": 0.9}}, "is not known here"),
        ({"credit": {"kind": "turn", "weight": 1.0}}, "is not known here"),
        ({"credit": {"kind": "anchor", "weight": 0.0}}, "greater than 0"),
        ({"advantage": {"kind": "mean", "scores": {"a": 1.0}}}, "is not known here"),
        ({"advantage": BY_SCORES, "credit": "node"}, "credit='run'"),
        ({"advantage": {"kind": "standardized", "scores": {"a": float("nan")}}}, "finite"),
        ({"overlong": {"tokens": 8}}, "overlong.buffer: Field required"),
        ({"overlong": {"buffer": 8}}, "overlong.tokens: Field required"),
        ({"overlong": {"tokens": 8, "buffer": 9}}, "at most as large"),
        ({"overlong": LONG, "advantage": "maxrl"}, "maxrl"),
        ({"overlong": LONG, "credit": "call"}, "credit='call'"),
        ({"overlong": LONG, "advantage": BY_SCORES}, "no reward that could be lowered"),
        ({"learning_rate": float("nan")}, "finite"),
        ({"loss": {"kind": "clip", "clip_high": float("inf")}}, "finite"),
        ({"clip_low": 0.2}, "is not known here"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**fields)


def test_a_supervised_step_has_neither_settings_of_rewards_nor_a_retrain() -> None:
    names = ("advantage", "credit", "loss", "kl", "overlong", "guard", "max_staleness")
    for name in (*names, "max_logprob_gap"):
        assert name in TrainConfig.model_fields
        with pytest.raises(ConfigError, match="is not known here"):
            SFTConfig(**{name: None})
    with pytest.raises(ValidationError, match="retrain=true for a step of the kind 'sft'"):
        TrainRequest(policy="p", groups=(("a",),), config=SFTConfig(), retrain=True)


def test_a_preference_step_has_the_settings_of_its_weighted_step() -> None:
    kept = ("learning_rate", "schedule", "max_grad_norm", "tokens_per_microbatch")
    for name in kept:
        assert getattr(PREFERENCE.weighted, name) == getattr(PREFERENCE, name)
    assert set(PreferenceConfig.model_fields) == {*kept, "kind", "beta"}


def test_rewards_of_a_request_are_of_its_runs_and_are_read() -> None:
    groups = (("a", "b"),)
    assert TrainRequest(policy="p", groups=groups, rewards={"a": 1.0}).rewards == {"a": 1.0}
    with pytest.raises(ValidationError, match="expected runs of `groups`"):
        TrainRequest(policy="p", groups=groups, rewards={"c": 1.0})
    scored = TrainConfig(advantage=Standardized(scores={"style": 1.0}))
    for config in (SFTConfig(), scored):
        for rewards in ({"rewards": {"a": 1.0}}, {"turns": {"call": 1.0}}):
            with pytest.raises(ValidationError, match="got rewards for a step that reads none"):
                TrainRequest(policy="p", groups=groups, config=config, **rewards)
    for wrong in (math.nan, math.inf, 1e10, True, "1"):
        with pytest.raises(ValidationError, match=r"turns\.call"):
            TrainRequest(policy="p", groups=groups, turns={"call": wrong})


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


def test_half_precision_rounds_coarsely() -> None:
    nats = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
    assert {dtype: logprob_tolerance(dtype) for dtype in nats} == nats


ORDER = {"policy": "p", "groups": [["a"]]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"learning_rte": 1e-3}, "learning_rte: .* did you mean learning_rate?"),
        ({"max_grad": 1.0}, "max_grad: .* did you mean max_grad_norm?"),
        ({"loss": {"kind": "gspo", "clip_hi": 1.0}}, "loss.clip_hi: .* did you mean clip_high?"),
        ({"lr": 1e-3}, "lr: .* did you mean learning_rate?"),
        (
            {"loss": {"importance_sampling": {"kind": "icepop", "hihg": 2.0}, "kind": "gspo"}},
            "loss.importance_sampling.hihg: .* did you mean high?",
        ),
        ({"zzz": 1}, "zzz: .* leave it out, or take one of .*learning_rate"),
        ({"learning_rate": 5}, r"learning_rate: .* less than or equal to 0.1 \(got 5\)"),
    ],
    ids=str,
)
def test_a_config_says_what_may_have_been_meant(config: dict[str, Any], words: str) -> None:
    words = words.replace("?", r"\?")
    with pytest.raises(ConfigError, match=f"^TrainConfig: {words}"):
        TrainConfig(**config)
    with pytest.raises(ValidationError) as bad:
        TrainRequest.model_validate(ORDER | {"config": config})
    refused = refuse(bad.value.errors(), TrainRequest)
    assert refused.param == "config"
    assert re.match(f"config.{words}", str(refused))


def test_a_field_of_a_body_too() -> None:
    for kind, body, words in (
        (TrainRequest, ORDER | {"trainabel": {}}, "did you mean trainable?"),
        (ChatBody, {"model": "m", "messages": [{}], "temprature": 1}, "did you mean temperature?"),
        (ChatBody, {"model": "m", "messages": [{}], "art": {"nod": "a"}}, "art.nod: "),
    ):
        with pytest.raises(ValidationError) as bad:
            kind.model_validate(body)
        assert words in str(refuse(bad.value.errors(), kind))
        assert words in in_words(bad.value, kind)


def test_each_group_of_settings_is_checked_where_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"^LoraConfig: rnk: .* did you mean rank"):
        LoraConfig(rnk=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match=r"^PolicySpec: name: got 'My Agent', expected a"):
        PolicySpec(name="My Agent")
    with pytest.raises(ConfigError, match=r"^GSPO: clip_hihg: .* did you mean clip_high"):
        GSPO(clip_hihg=1.0)  # pyright: ignore[reportCallIssue]

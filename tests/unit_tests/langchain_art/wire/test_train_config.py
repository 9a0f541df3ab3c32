import json
import math
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
    LRSchedule,
    OverlongPenalty,
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
)


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


PREFERENCE = PreferenceConfig(beta=0.3, learning_rate=1e-3)


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


WEIGHED = {"kind": "truncated", "low": 0.5}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": {"decay_steps": 3, "warmup_steps": 3}}, "decay_steps to be the larger"),
        ({"loss": {"kind": "clip", "dual_clip": 1.0}}, "greater than 1"),
        ({"loss": 3}, "valid dictionary or object"),
        ({"loss": {"clip_low": 0.1}}, "discriminator 'kind'"),
        ({"advantage": "rloo"}, ADVANTAGES),
        ({"distillation": {"teacher": "solver"}}, "expected 'policy@version', as in 'solver@7'"),
        ({"distillation": {"teacher": "a@1"}, "kl": K2}, "got kl and distillation"),
        ({"distillation": BLIND, "credit": "node"}, "where no reward is read"),
        ({"kl": {"estimator": "k3"}}, "kl.coefficient: Field required"),
        ({"loss": {"kind": "clip", "aggregation": {"value": 0.0}}}, "equal to 0.000001"),
        ({"loss": {"kind": "clip", "importance_sampling": WEIGHED}}, r"sampling\.low: this option"),
        ({"loss": {"kind": "clip", "importance_sampling": "off"}}, "'truncated', 'icepop'"),
        ({"advantage": {"kind": "mean", "scores": {"a": 1.0}}}, "is not known here"),
        ({"advantage": BY_SCORES, "credit": "node"}, "credit='run'"),
        ({"advantage": {"kind": "standardized", "scores": {"a": float("nan")}}}, "finite"),
        ({"overlong": {"tokens": 8, "buffer": 9}}, "at most as large"),
        ({"overlong": LONG, "advantage": "maxrl"}, "maxrl"),
        ({"overlong": LONG, "credit": "call"}, "credit='call'"),
        ({"overlong": LONG, "advantage": BY_SCORES}, "no reward that could be lowered"),
        ({"learning_rate": float("nan")}, "finite"),
        ({"clip_low": 0.2}, "is not known here"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**fields)


def test_a_supervised_step_has_neither_settings_of_rewards_nor_a_retrain() -> None:
    for name in ("advantage", "credit", "loss", "kl", "overlong", "guard", "max_staleness"):
        assert name in TrainConfig.model_fields
        with pytest.raises(ConfigError, match="is not known here"):
            SFTConfig(**{name: None})
    with pytest.raises(ValidationError, match="retrain=true for a step of the kind 'sft'"):
        TrainRequest(policy="p", groups=(("a",),), config=SFTConfig(), retrain=True)


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

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


@pytest.mark.parametrize(
    ("field", "group"),
    [
        *(("loss", loss()) for loss in (ClippedRatio, GSPO, CISPO, DPPOTV)),
        *(("advantage", SimpleAdvantage(kind=kind)) for kind in ("mean", "leave_one_out", "maxrl")),
        ("advantage", Standardized()),
        *(("credit", SimpleCredit(kind=kind)) for kind in ("run", "node")),
        *(("credit", credit()) for credit in (TurnCredit, AnchorCredit)),
    ],
    ids=lambda value: str(getattr(value, "kind", "")),
)
def test_the_string_of_a_kind_is_that_kind_with_its_defaults(field: str, group: Any) -> None:
    for given in (group, group.kind, group.model_dump()):
        assert getattr(TrainConfig(**{field: given}), field) == group


@pytest.mark.parametrize("group", [TruncatedIS(), IcePop(), SequenceMask()])
def test_kinds_of_importance_sampling(group: Any) -> None:
    for loss in (ClippedRatio, GSPO, CISPO):
        assert loss(importance_sampling=group.kind).importance_sampling == group
        assert loss(importance_sampling=None).importance_sampling is None


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


@pytest.mark.parametrize(
    "name",
    ["advantage", "credit", "loss", "kl", "overlong", "guard", "max_logprob_gap", "max_staleness"],
)
def test_a_supervised_step_has_no_settings_of_rewards(name: str) -> None:
    assert name in TrainConfig.model_fields
    with pytest.raises(ConfigError, match="is not known here"):
        SFTConfig(**{name: None})


def test_a_supervised_step_needs_no_retrain() -> None:
    with pytest.raises(ValidationError, match="retrain=true for a step of the kind 'sft'"):
        TrainRequest(policy="p", groups=(("a",),), config=SFTConfig(), retrain=True)


def test_a_preference_step_has_the_settings_of_its_weighted_step() -> None:
    kept = ("learning_rate", "schedule", "max_grad_norm", "tokens_per_microbatch")
    for name in kept:
        assert getattr(PREFERENCE.weighted, name) == getattr(PREFERENCE, name)
    assert set(PreferenceConfig.model_fields) == {*kept, "kind", "beta"}


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().optimizer_steps = 2
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().loss.clip_low = 0.1


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

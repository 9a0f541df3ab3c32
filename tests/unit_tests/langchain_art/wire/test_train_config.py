from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from langchain_art.wire import TrainConfig, TrainRequest
from langchain_art.wire.train_config import DEFAULTS


def test_todays_fields_still_make_a_config() -> None:
    config = TrainConfig(
        learning_rate=1e-3,
        warmup_steps=2,
        decay_steps=9,
        final_learning_rate=0.2,
        advantage="standardized",
        clip_low=0.1,
        clip_high=0.3,
        max_grad_norm=0.5,
        updates=2,
        tokens_per_microbatch=128,
    )
    assert (config.clip_low, config.clip_high, config.dual_clip) == (0.1, 0.3, 3.0)
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "aggregation": "token"}),
        ({}, {"importance": "truncated", "importance_low": None, "importance_high": 2.0}),
        ({}, {"credit": "run", "discount": 1.0, "anchor_weight": 0.0}),
        ({"loss": "gspo"}, {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"}),
        ({"loss": "gspo", "aggregation": "run"}, {"aggregation": "run", "dual_clip": None}),
        ({"loss": "cispo"}, {"clip_low": 1.0, "clip_high": 4.0, "dual_clip": None}),
        ({"loss": "dppo_tv"}, {"clip_high": 0.2, "importance": "off", "importance_high": None}),
        ({"loss": "sft"}, {"importance": "off", "guard": None, "max_staleness": None}),
        ({"loss": "sft", "learning_rate": 1e-3}, {"learning_rate": 1e-3, "dual_clip": None}),
        ({"importance": "icepop"}, {"importance_low": 0.5, "importance_high": 5.0}),
        ({"importance": "icepop", "importance_high": 2.0}, {"importance_low": 0.5}),
        ({"importance": "sequence_mask"}, {"importance_low": None, "importance_high": 3.0}),
        ({"credit": "anchor"}, {"discount": 0.95, "anchor_weight": 1.0}),
        ({"dual_clip": None}, {"dual_clip": None}),
    ],
    ids=str,
)
def test_defaults_of_choices(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    config = TrainConfig(**choice)
    assert {name: getattr(config, name) for name in expected} == expected
    again = TrainRequest.model_validate_json(
        json.dumps({"policy": "p", "groups": [["a"]], "config": choice})
    )
    assert again.config == config


def test_the_declared_defaults_are_those_of_the_default_choices() -> None:
    fields = TrainConfig.model_fields
    for choice, options in DEFAULTS.items():
        assert set(options) == set(_offered(choice))
        for name, value in options[fields[choice].default].items():
            assert fields[name].default == value


def _offered(name: str) -> list[str]:
    return TrainConfig.model_json_schema()["properties"][name]["enum"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"decay_steps": 3, "warmup_steps": 3}, "decay_steps"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"dual_clip": 3.0, "loss": "gspo"}, "loss='clip'"),
        ({"loss": "dppo_tv", "clip_high": 1.0}, "difference of two probabilities"),
        ({"loss": "dppo_tv", "importance": "truncated"}, "against the sampler already"),
        ({"loss": "vespo"}, "'clip', 'gspo'"),
        ({"loss": 3}, "'clip', 'gspo'"),
        *(
            ({"loss": "sft"} | given, f"{next(iter(given))}=.* with loss='sft'.* does not read it")
            for given in (
                {"credit": "turn"},
                {"advantage": "standardized"},
                {"clip_low": 0.1},
                {"guard": 1.5},
                {"max_logprob_gap": 0.5},
                {"max_staleness": 8},
                {"importance": "truncated"},
                {"scores": {"a": 1.0}},
                {"kl": "k3", "kl_coefficient": 0.1},
                {"flat_tolerance": 0.1},
                {"overlong_tokens": 8, "overlong_buffer": 4},
            )
        ),
        ({"kl": "k3"}, "coefficient above 0"),
        ({"kl_coefficient": 0.1}, "coefficient above 0"),
        ({"kl": "k4", "kl_coefficient": 0.1}, "'k1', 'k2' or 'k3'"),
        ({"aggregation": "constant"}, "constant"),
        ({"aggregation_constant": 5.0}, "constant"),
        ({"importance": "off", "importance_high": 2.0}, "expected none"),
        ({"importance": "truncated", "importance_low": 0.5}, "icepop"),
        ({"importance": "truncated", "importance_high": None}, "expected those of 'truncated'"),
        ({"importance": "icepop", "importance_low": None}, "expected those of 'icepop'"),
        ({"importance_high": 1.0}, "greater than 1"),
        ({"guard": 1.0}, "greater than 1"),
        ({"guard": 0.9}, "greater than 1"),
        ({"max_logprob_gap": 0.0}, "greater than 0"),
        ({"discount": 0.9}, "credit='turn'"),
        ({"discount": 0.9, "credit": "node"}, "credit='turn'"),
        ({"anchor_weight": 1.0}, "credit='anchor'"),
        ({"anchor_weight": 0.0, "credit": "anchor"}, "credit='anchor'"),
        ({"scores": {"a": 1.0}}, "advantage='standardized'"),
        ({"scores": {"a": 1.0}, "advantage": "standardized", "credit": "node"}, "credit='run'"),
        ({"scores": {"a": float("nan")}, "advantage": "standardized"}, "finite"),
        ({"overlong_tokens": 8}, "expected both"),
        ({"overlong_buffer": 8}, "expected both"),
        ({"overlong_tokens": 8, "overlong_buffer": 9}, "at most as large"),
        ({"overlong_tokens": 8, "overlong_buffer": 4, "advantage": "maxrl"}, "maxrl"),
        ({"learning_rate": float("nan")}, "finite"),
        ({"clip_high": float("inf")}, "finite"),
        ({"clip": 0.2}, "Extra inputs"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainConfig(**fields)


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().updates = 2

"""`TrainConfig` in a real step: every field acts, the base model is kept near, faults stop it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from langchain_art.credit.batch_plan import plan
from langchain_art.credit.candidates import CandidateCall, CandidateRun
from langchain_art.errors import ArtError
from langchain_art.wire import JobConfig, SFTConfig, TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft import training_batch
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.learner_cases import (
    FILES,
    branching_rows,
    contents,
    folder,
    fresh,
    jittered,
    make_rows,
    on_policy,
    quiet,
    shake,
)

CLIP = {"kind": "clip"}
CONSTANT, ICEPOP = {"kind": "constant", "value": 5.0}, {"kind": "icepop"}
KL = {"estimator": "k3", "coefficient": 0.5}
TEACHER = {"teacher": "a@0"}
CUT = {"tokens": 8, "buffer": 4}
#: As an operator registers them.
OWN = {name: f"tests.support.own_losses:{name}" for name in ("clipped", "imitating")}
TWICE: dict[str, Any] = {"optimizer_steps": 2}
#: Field (dotted: of a group) -> what the step has anyway, and what is changed.
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "kind": ({}, "sft"),
    "learning_rate": ({}, 2e-2),
    "schedule.warmup_steps": ({}, 4),
    "schedule.decay_steps": ({}, 4),
    "schedule.final_fraction": ({"schedule": {"decay_steps": 4}}, 0.5),
    "momentum": (TWICE, 0.9),
    "max_grad_norm": ({}, 1e-9),  # Adam forgives any scale that is not near its epsilon
    "optimizer_steps": ({}, 2),
    "tokens_per_microbatch": ({}, 64),
    "advantage": ({}, "mean"),
    "entropy_bonus": ({}, 0.5),
    "advantage.scores": ({"advantage": {"kind": "standardized"}}, {"a": 1.0}),
    "credit": ({}, "node"),
    "credit.discount": ({"credit": {"kind": "turn"}}, 0.5),
    "credit.weight": ({"credit": {"kind": "anchor"}}, 0.5),
    "zero_variance_tolerance": ({}, 2.0),
    "mask_truncated": ({}, True),
    "max_staleness": ({}, 1),
    "overlong": ({}, CUT),
    "overlong.tokens": ({"overlong": CUT}, 9),
    "overlong.buffer": ({"overlong": CUT}, 2),
    "loss": ({"loss": CLIP | {"importance_sampling": None}}, "dppo_tv"),
    "loss.name": ({"loss": {"kind": "own", "name": "clipped"}}, "imitating"),
    "loss.options": (TWICE | {"loss": {"kind": "own", "name": "clipped"}}, {"low": 0.01}),
    "loss.clip_low": (TWICE | {"loss": CLIP}, 0.01),
    "loss.clip_high": (TWICE | {"loss": CLIP}, 0.01),
    "loss.dual_clip": (TWICE | {"loss": CLIP}, 1.01),
    "loss.aggregation": ({"loss": CLIP}, "run"),
    "loss.aggregation.value": ({"loss": CLIP | {"aggregation": CONSTANT}}, 7.0),
    "loss.importance_sampling": ({"loss": CLIP}, "icepop"),
    "loss.importance_sampling.low": ({"loss": CLIP | {"importance_sampling": ICEPOP}}, 0.9),
    "loss.importance_sampling.high": ({"loss": CLIP | {"importance_sampling": ICEPOP}}, 1.05),
    "distillation": ({}, TEACHER),
    "distillation.coefficient": ({"distillation": TEACHER}, 0.5),
    "distillation.rewards": ({"distillation": TEACHER}, False),
    "kl": ({}, KL),
    "kl.estimator": ({"kl": KL}, "k1"),
    "kl.coefficient": ({"kl": KL}, 1.0),
    "max_kl": ({}, 1e-4),
    "guard": ({}, 1.05),
    "max_logprob_gap": ({}, 0.01),
}


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`base` with one field, in whichever group it is, set to `value`."""
    first, _, rest = path.partition(".")
    return base | {first: changed(base.get(first, {}), rest, value) if rest else value}


def made(config: dict[str, Any]) -> JobConfig:
    config = {"learning_rate": 2e-5} | config
    if config.get("kind") == "sft":
        return SFTConfig(**{k: v for k, v in config.items() if k in SFTConfig.model_fields})
    return TrainConfig(**config)


def fields_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted names of all settings of a config and its groups."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        if prefix and name == "kind":
            continue
        inner = {path for group in _groups_of(field.annotation) for path in fields_of(group, name)}
        found |= inner
        if not inner or name != "schedule":
            found.add(name)
    return {f"{prefix}.{name}" if prefix else name for name in found}


def _groups_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [group for one in get_args(annotation) for group in _groups_of(one)]


def groups() -> list[list[CandidateRun]]:
    """Runs that each field of the plan has something to say about."""
    first = CandidateCall(3, "a", reward=0.2, prompt="s", lag=2)
    cut = CandidateCall(4, "a", prompt="s", truncated=True)
    return [
        [
            CandidateRun((first, CandidateCall(2, "b")), 1.0, {"a": 0.0}),
            CandidateRun((cut, CandidateCall(3, "b", reward=0.5)), 0.0, {"a": 1.0}),
            CandidateRun((CandidateCall(1, "a", prompt="s"),), 0.0, {"a": 0.3}),
        ]
    ]


@pytest.fixture(scope="module")
def outcome(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[JobConfig], Any]:
    """All that a config decides: the plan, the adapter, how it was made, or why it was not."""
    core, where = LearnerCore(tiny, losses=OWN), tmp_path_factory.mktemp("outcomes")
    start = shake(fresh(core, where))
    rows = jittered(on_policy(core, start, branching_rows(8, seed=9)), 0.3)

    def of(config: JobConfig) -> Any:
        candidates = groups()
        if isinstance(config, TrainConfig) and config.scores:
            # Rewards of calls have no place beside scores.
            [runs] = candidates
            bare = (tuple(replace(call, reward=None) for call in run.calls) for run in runs)
            candidates = [
                [replace(run, calls=calls) for run, calls in zip(runs, bare, strict=True)]
            ]
        heard: list[str] = []
        out = folder(where, f"out{len(list(where.iterdir()))}")
        try:
            step = LearnerStep(start, out, 2, rows, config)
            core.step(step, lambda _, message: heard.append(message))
            made: Any = contents(out)[FILES[1]]
        except ArtError as error:
            made = str(error)
        return plan(candidates, config), made, heard

    return of


#: Nothing is left out, and nothing refused.
OPEN: dict[str, Any] = {
    "learning_rate": 1e-2,
    "guard": None,
    "max_logprob_gap": None,
    "max_kl": None,
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_acts(field: str, outcome: Callable[[JobConfig], Any]) -> None:
    given, value = CHANGES[field]
    before = outcome(made(OPEN | given))
    after = outcome(made(changed(OPEN | given, field, value)))
    assert before != after
    if field == "tokens_per_microbatch":
        assert len(before[2]) < len(after[2])
    if field == "max_logprob_gap":
        assert "nats apart per token" in after[1]


def test_the_config_alone_decides(outcome: Callable[[JobConfig], Any]) -> None:
    assert outcome(made(OPEN | TWICE)) == outcome(made(OPEN | TWICE))


def test_no_field_is_left_out_of_the_test_above() -> None:
    # The server hands the learner the files of that version: `test_learner_core` scores one.
    assert set(CHANGES) | {"kl.reference", "distillation.teacher"} == fields_of(TrainConfig)


# --- sampler against learner ----------------------------------------------------------------------


def rolled(row: Row, by: int) -> Row:
    """The row, each of whose tokens behind the first has the logprob of another one."""
    logprobs = row.logprobs[1:]
    return replace(row, logprobs=[0.0, *logprobs[-by:], *logprobs[:-by]])


def test_each_fault_stops_the_step_and_is_named(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = LearnerCore(tiny)
    adapter, other = (shake(fresh(core, tmp_path), scale) for scale in (0.3, -0.3))
    rows = [
        replace(row, mask=[0] + [1] * (len(row.mask) - 1), advantages=[0.0] * len(row.mask))
        for row in make_rows(12, low=8)
    ]
    colder = on_policy(core, adapter, [replace(row, temperature=0.7) for row in rows])
    good, base = on_policy(core, adapter, rows), on_policy(core, None, rows)
    cases = [
        ([replace(row, temperature=1.0) for row in colder], r"0\.7, while the calls say 1:"),
        ([replace(row, temperature=0.6) for row in good], r"1, while the calls say 0\.6"),
        ([rolled(row, 1) for row in good], "token before it"),
        ([rolled(row, -1) for row in good], "token after it"),
        (on_policy(core, other, rows), "No usual fault explains it"),
        ([*good, *base[:5]], "did not apply the adapter"),  # those furthest off are looked at
    ]
    monkeypatch.setattr(training_batch, "PROBE_TOKENS", 40)
    for number, (wrong, words) in enumerate(cases):
        out = folder(tmp_path, f"out{number}")
        step = LearnerStep(adapter, out, 1, wrong, TrainConfig(learning_rate=2e-5))
        with pytest.raises(ArtError, match=words) as caught:
            core.step(step, quiet)
        assert "Nothing was published" in str(caught.value) and contents(out) == {}
        metrics = core.step(replace(step, staleness=100.0), quiet)  # it may be that far
        assert metrics["logprob_gap_mean"] > 0.1
    metrics = core.step(replace(step, rows=good, out=folder(tmp_path, "good")), quiet)
    assert metrics["logprob_gap_mean"] < 1e-5 and metrics["guarded_fraction"] == 0.0
    assert metrics["importance_mean"] == metrics["importance_ess"] == pytest.approx(1.0, abs=1e-4)

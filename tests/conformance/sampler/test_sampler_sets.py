"""The embedded sampler and the learner agree on tokens that were drawn from a part of all."""

from pathlib import Path
from typing import Any

import pytest

from langchain_art_server.algorithms.sequences.token_sets import single, unpack
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.learner_cases import gaps
from tests.support.tiny_models import CLOCK, WEATHER, LocalSampler, ask, save_adapter

SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["mail", "team", "weather"]}, "why": {"type": "string"}},
    "required": ["to", "why"],
}
JSON = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


#: Options of calls whose tokens are drawn from some of all.
RESTRICTED: list[dict[str, Any]] = [
    {"response_format": JSON},
    {"response_format": JSON, "temperature": 0.6},
    {"tools": [WEATHER, CLOCK], "tool_choice": "required", "temperature": 1.4},
    {"tools": [CLOCK], "tool_choice": {"function": {"name": "clock"}}},
    {"top_p": 0.8},
    {"top_k": 5, "temperature": 1.7},
    {"response_format": JSON, "top_k": 40, "top_p": 0.9, "temperature": 0.8},
]


@pytest.fixture(scope="module")
def sampler(model: Path) -> LocalSampler:
    return LocalSampler(model)


def test_the_learner_renormalises_over_the_tokens_that_could_be_drawn(
    model: Path, sampler: LocalSampler, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "a", model, 1)
    sampler.load("a@1", adapter)
    asked = [options for options in RESTRICTED for _ in range(6)]
    *replies, free = sampler.chat(
        *(
            ask("mail of Ann", seed=i % 6, max_tokens=60, adapter="a@1", **options)
            for i, options in enumerate(asked)
        ),
        ask("mail of Ann", seed=9, max_tokens=60, adapter="a@1"),
    )
    core = LearnerCore(str(model), "cpu", "float32")
    assert gaps(core, adapter, [free]).max() <= 1e-5
    assert free.drawn_from == b"" and free.excluded_because is None
    bits = sampler.host.info.vocab_size // 8
    for options, reply in zip(asked, replies, strict=True):
        assert gaps(core, adapter, [reply], options.get("temperature", 1.0)).max() <= 1e-5
        assert reply.excluded_because is None
        sets = unpack(reply.drawn_from)
        assert len(sets) == len(reply.token_ids)
        assert len(reply.drawn_from) < 64 + (bits + 8) * len(reply.token_ids)
        for token, logprob, one in zip(reply.token_ids, reply.logprobs, sets, strict=True):
            assert (one == single(token)) == (logprob == 0.0)


def test_a_greedy_call_says_so_under_a_grammar_too(sampler: LocalSampler) -> None:
    (reply,) = sampler.chat(ask(response_format=JSON, temperature=0.0, top_p=0.5, max_tokens=60))
    assert reply.excluded_because == "greedy decoding: temperature=0"


def test_sets_that_take_too_much_exclude_their_call_alone(
    sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_art_server.algorithms.sequences.token_sets.MAX_BYTES", 64)
    long, short = sampler.chat(
        ask(seed=1, top_p=0.99, max_tokens=40), ask(seed=2, top_k=2, max_tokens=3)
    )
    assert (long.excluded_because or "").startswith("truncated sampling: top_p=0.99; the tokens")
    assert long.drawn_from == b""
    assert short.excluded_because is None


def _only(schema: dict[str, Any]) -> dict[str, Any]:
    """Options of a reply that must follow a schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"response_format": wanted}


@pytest.mark.parametrize(
    ("options", "by"),
    [
        ({"top_k": 1}, "top_k=1"),
        ({"top_p": 1e-6}, "top_p=1e-06"),
        ({"top_k": 1, "response_format": JSON}, "top_k=1"),
        ({**_only({"const": 7}), "max_tokens": 1}, "response_format"),
        ({"temperature": 1e-3, "max_tokens": 1}, "temperature=0.001"),
    ],
)
def test_a_reply_without_a_choice_is_excluded_by_its_reason(
    sampler: LocalSampler, options: dict[str, Any], by: str
) -> None:
    (reply,) = sampler.chat(ask(seed=1, **{"max_tokens": 12, **options}))
    assert set(reply.logprobs) == {0.0}
    assert reply.excluded_because == f"no choice: {by}; each token had the probability 1"


@pytest.mark.parametrize(
    "options",
    [{"top_k": 2}, {"top_p": 0.9}, _only({"enum": ["a door", "b"]}), {"temperature": 0.9}, {}],
)
def test_a_reply_with_a_choice_learns(sampler: LocalSampler, options: dict[str, Any]) -> None:
    (reply,) = sampler.chat(ask(seed=1, max_tokens=12, **options))
    assert any(reply.logprobs) and reply.excluded_because is None

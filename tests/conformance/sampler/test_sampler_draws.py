"""The embedded sampler: reproducible and correct draws, also from a part of all, and refusals."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_art.errors import ConfigError, InvalidRequest, PromptTooLong
from langchain_art_server.algorithms.sequences.token_sets import mask_of, single, unpack
from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.learner_cases import gaps
from tests.support.soak import in_soak_alone, share
from tests.support.tiny_models import (
    CLOCK,
    WEATHER,
    LocalSampler,
    ask,
    check_logprobs,
    load_plain,
    save_adapter,
    save_model,
)


@pytest.fixture(scope="module")
def sampler(model: Path) -> LocalSampler:
    return LocalSampler(model)


def test_greedy_is_generates_greedy_twice(model: Path, sampler: LocalSampler) -> None:
    requests = [ask("mail " * i, temperature=0.0, max_tokens=16) for i in range(1, 5)]
    first, second = sampler.chat(*requests), sampler.chat(*requests)
    plain = load_plain(model)
    for one, two in zip(first, second, strict=True):
        assert one.token_ids == two.token_ids
        ids = torch.tensor([one.prompt_token_ids])
        out = plain.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=[0, 2])
        assert out[0, ids.shape[1] :].tolist() == one.token_ids
        assert one.excluded_because == "greedy decoding: temperature=0"
    check_logprobs(plain, first)


def test_without_a_seed_replies_differ(sampler: LocalSampler) -> None:
    replies = sampler.chat(*(ask(max_tokens=8) for _ in range(6)))
    assert len({tuple(reply.token_ids) for reply in replies}) == 6
    assert all(reply.excluded_because is None for reply in replies)


def expected_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The definition of temperature, top_k and top_p, one token at a time in float64."""
    weights = (logits.double() / sampling.temperature).softmax(0)
    order = sorted(range(len(weights)), key=lambda i: -float(weights[i]))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(float(weights[i]) for i in order)
    kept, sum_ = [], 0.0
    for i in order:
        if sum_ / total >= sampling.top_p:
            break
        kept.append(i)
        sum_ += float(weights[i])
    result = torch.zeros_like(weights)
    result[kept] = weights[kept] / weights[kept].sum()
    return result


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        in_soak_alone({"temperature": 2.0}),  # too few draws of each token
        {"top_p": 0.6},
        {"top_k": 7},
        {"top_k": 9, "top_p": 0.7, "temperature": 1.5},
    ],
)
def test_tokens_are_drawn_from_the_distribution_asked_for(
    model: Path, sampler: LocalSampler, options: dict[str, Any]
) -> None:
    draws = 1500 if share() else 600
    requests = [ask("mail", seed=i, max_tokens=1, **options) for i in range(draws)]
    replies = sampler.chat(*requests)
    assert {reply.excluded_because for reply in replies} == {None}
    with torch.no_grad():
        ids = torch.tensor([replies[0].prompt_token_ids])
        logits = load_plain(model)(ids).logits[0, -1]
    wanted = expected_distribution(logits, requests[0].sampling)
    expected = wanted * draws
    seen = torch.bincount(
        torch.tensor([reply.token_ids[0] for reply in replies]), minlength=len(logits)
    )
    assert seen[expected == 0].sum() == 0
    common = expected >= 5
    rest_seen, rest = seen[~common].sum(), expected[~common].sum()
    chi2 = float(((seen - expected)[common] ** 2 / expected[common]).sum())
    chi2 += float((rest_seen - rest) ** 2 / rest) if rest > 5 else 0.0
    freedom = int(common.sum())
    assert freedom >= 3
    # Wilson-Hilferty: the draws are seeded, so this passes or fails for good.
    normal = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert normal < 3.1
    # What is recorded: the tokens that could be drawn, and logprobs over these alone.
    assert len({reply.drawn_from for reply in replies}) == 1
    if options.keys() & {"top_k", "top_p"}:
        (kept,) = unpack(replies[0].drawn_from)
        assert mask_of(kept, len(logits)).tolist() == (wanted > 0).tolist()
    for reply in replies[:20]:
        assert reply.logprobs[0] == pytest.approx(float(wanted[reply.token_ids[0]].log()), abs=1e-5)


def test_every_end_of_turn_token_ends_a_reply(tmp_path: Path) -> None:
    # <|endoftext|> (0) and another one (9) by the configs, <|im_end|> (2) by the chat template.
    sampler = LocalSampler(save_model(tmp_path / "model", eos_token_id=[0, 9], num_hidden_layers=1))
    assert sampler.host._eos == {0, 2, 9}
    replies = sampler.chat(*(ask(seed=i, max_tokens=200) for i in range(30)))
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    assert {reply.token_ids[-1] for reply in ended} == {0, 2, 9}
    for reply in ended:
        assert not {0, 2, 9} & set(reply.token_ids[:-1])
        assert "<|im_end|>" not in (reply.content or "")


def test_max_tokens_is_cut_to_the_room_and_a_longer_prompt_is_refused(model: Path) -> None:
    sampler = LocalSampler(model, max_model_len=64)
    everything = [ask(max_tokens=None, seed=i) for i in range(9)]
    more = [ask(max_tokens=500, seed=i) for i in range(9)]
    replies = [r for r in sampler.chat(*everything, *more) if r.finish_reason == "length"]
    assert len(replies) >= 4
    for reply in replies:
        assert len(reply.prompt_token_ids) + len(reply.token_ids) == 64
    check_logprobs(load_plain(model), replies)
    with pytest.raises(PromptTooLong, match=r"at most 63.*max_model_len"):
        sampler.chat(ask("x" * 200))
    assert sampler.chat(ask())[0].token_ids


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_model_len": 4096}, "has a context of 1024"),
        ({"device": "warp"}, "device='warp'"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_a_model_that_can_not_be_served_is_refused(
    model: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        LocalSampler(model, **settings)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "alien", "content": "x"}], "no aliens here"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": "\ud800"}], "surrogates"),
        ([], "no messages"),
        (
            [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                },
            ],
            r"messages\[1\].tool_calls\[0\]",
        ),
    ],
)
def test_messages_that_can_not_be_shown_are_refused_and_hurt_nobody(
    sampler: LocalSampler, messages: list[dict[str, Any]], problem: str
) -> None:
    bad, good = sampler.send(ask(messages=messages)), sampler.send(ask(seed=1))
    sampler.run()
    with pytest.raises(InvalidRequest, match=problem):
        sampler.reply(bad)
    assert sampler.reply(good).token_ids


def test_a_temperature_that_float32_can_not_hold_is_refused(sampler: LocalSampler) -> None:
    with pytest.raises(InvalidRequest, match="temperature=1e-40"):
        sampler.chat(ask(temperature=1e-40))
    (cold,) = sampler.chat(ask(temperature=1e-3, seed=1))
    (greedy,) = sampler.chat(ask(temperature=0.0))
    assert cold.token_ids == greedy.token_ids


def test_a_seed_gives_the_ids_of_tool_calls_too(sampler: LocalSampler) -> None:
    """A template may write them into the next prompt. Another prompt has other ids."""

    def ids(text: str, seed: int | None) -> list[str]:
        asked = ask(text, seed=seed, tools=[CLOCK], tool_choice="required", max_tokens=200)
        [reply] = sampler.chat(asked)
        return [call["id"] for call in reply.tool_calls]

    assert ids("Paris", 1) == ids("Paris", 1) != []
    assert len({*ids("Paris", 1), *ids("Rome", 1), *ids("Paris", 2), *ids("Paris", None)}) >= 4


# --- tokens that are drawn from a part of all ------------------------------------------------

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
        ({"top_k": 1, "response_format": JSON}, "top_k=1"),
        ({"top_p": 1e-6}, "top_p=1e-06"),
        ({**_only({"const": 7}), "max_tokens": 1}, "response_format"),
        ({"temperature": 1e-3, "max_tokens": 1}, "temperature=0.001"),
        ({"top_k": 2}, None),
        (_only({"enum": ["a door", "b"]}), None),
    ],
)
def test_a_reply_without_a_choice_is_excluded_by_its_reason(
    sampler: LocalSampler, options: dict[str, Any], by: str | None
) -> None:
    (reply,) = sampler.chat(ask(seed=1, **{"max_tokens": 12, **options}))
    why = f"no choice: {by}; each token had the probability 1" if by else None
    assert any(reply.logprobs) == (by is None) and reply.excluded_because == why

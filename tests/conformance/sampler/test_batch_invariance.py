"""A call's tokens and logprobs are the same bits alone and beside any other calls."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from langchain_art.diagnostics.doctor import read_shape
from langchain_art.gpu_memory import MemoryNeeds
from langchain_art_server.backends.base import ChatReply
from langchain_art_server.backends.embedded.batch_invariance import packed_attention
from langchain_art_server.backends.embedded.model_runner import SlotRunner
from tests.support.soak import count, in_soak_alone
from tests.support.tiny_models import (
    KINDS,
    LocalSampler,
    ask,
    save_adapter,
    save_model,
    three_adapters,
)

_TEXT = "the weather in Paris is sunny and the mail of Ann was sent on Monday at ten to the team"
_KINDS = ("qwen3", "gemma3", "qwen3_5", "llama", "qwen2", "mistral")


def _calls(number: int) -> list[dict[str, Any]]:
    """Prompts of 1 to 90 words, half of which begin alike, for four policies."""
    rng = random.Random(5)
    opening = _text(rng, 30)
    return [
        {
            "text": " ".join([opening] * (rng.random() < 0.5) + [_text(rng, rng.randint(1, 60))]),
            "seed": seed,
            "max_tokens": rng.randint(4, 40),
            "temperature": rng.choice([0.7, 1.0]),
            "adapter": rng.choice([None, "a@1", "b@1", "c@1"]),
        }
        for seed in range(number)
    ]


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_TEXT.split()) for _ in range(words))


def _check(model: Path, calls: list[dict[str, Any]], *widths: int, **settings: Any) -> None:
    """Fresh samplers give the same bits one by one as with so many of the calls sent at once."""
    adapters = three_adapters(model.parent / "adapters", model)
    found: list[list[ChatReply]] = []
    for width in (1, *widths):
        sampler = LocalSampler(model, **settings)
        for name, path in adapters.items():
            sampler.load(name, path)
        found.append([])
        for first in range(0, len(calls), width):
            found[-1] += sampler.chat(*[ask(**call) for call in calls[first : first + width]])
        assert _bits(found[-1]) == _bits(found[0])


def _bits(replies: list[ChatReply]) -> list[tuple[list[int], list[float]]]:
    return [(list(reply.token_ids), list(reply.logprobs)) for reply in replies]


@pytest.mark.soak
@pytest.mark.parametrize("kind", _KINDS[: count(3, 6)])
def test_calls_do_not_depend_on_their_batch(kind: str, tmp_path: Path) -> None:
    layers = count(2, 3)
    types = KINDS[kind][1].get("layer_types", [None] * layers)[:layers]
    kinds = {} if None in types else {"layer_types": types}
    model = save_model(tmp_path / "model", kind, num_hidden_layers=layers, **kinds)
    calls = _calls(count(16, 200) if kind == "qwen3" else count(8, 32))
    _check(model, calls, *(8, 32)[: 2 if kind == "qwen3" else count(1, 2)])


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    """A sampler sets the threads of the whole process."""
    yield
    torch.set_num_threads(1)


# Two threads that are not alone on two cores wait for each other a hundred times as long.
@pytest.mark.soak
@pytest.mark.usefixtures("one_thread_after")
@pytest.mark.parametrize("threads", [1, 2][: count(1, 2)])
@pytest.mark.parametrize(
    "key_heads", [pytest.param(2, id="some large"), in_soak_alone(4, id="all large")]
)
def test_large_layers_do_not_depend_on_their_batch(
    key_heads: int, threads: int, tmp_path: Path
) -> None:
    """Layers that are computed by oneDNN, and more keys than one block of attention has.

    Adapters are computed by MKL, even where no layer is.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    sizes |= {"num_key_value_heads": key_heads, "num_hidden_layers": count(1, 3)}
    model = save_model(tmp_path / "model", "llama", **sizes)
    calls = _calls(count(9, 12))
    for call in calls[::3]:
        call["text"] *= 3
    sampler = {"threads": threads, "kv_cache_bytes": 64 << 20}
    _check(model, calls, *(5, 12)[: count(1, 2)], sampler=sampler)


def test_a_reply_is_the_same_after_its_prefix_was_forgotten(tmp_path: Path) -> None:
    """A second turn continues keys and values of decoded tokens, or computes them as a prompt."""
    sampler = LocalSampler(save_model(tmp_path / "model"))
    [reply] = sampler.chat(ask("the mail of Ann", seed=1, max_tokens=40))
    turns = [
        {"role": "user", "content": "the mail of Ann"},
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": "the weather"},
    ]

    def second() -> list[ChatReply]:
        return sampler.chat(ask(messages=turns, seed=2, max_tokens=20))

    prefixes = sampler.host._prefixes
    assert prefixes is not None
    held = prefixes.hit_tokens
    continued = second()
    assert prefixes.hit_tokens > held
    prefixes.forget(0)
    assert _bits(second()) == _bits(continued)


def test_a_model_whose_calls_depend_on_their_batch_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts and routers are products of their own, whose rows nothing pads."""
    sampler = LocalSampler(save_model(tmp_path / "model", "qwen3_moe"))
    runner = sampler.host.scheduler._runner
    assert isinstance(runner, SlotRunner) and runner.invariance is None
    assert "Qwen3MoeForCausalLM: the tokens of a seed may differ" in caplog.text


@pytest.mark.parametrize(
    ("kind", "dtype", "tied"),
    [
        ("llama", "float32", True),
        ("llama", "bfloat16", False),
        ("qwen3_moe", "float32", False),
    ],
)
def test_the_doctor_counts_weights_and_their_copies(
    kind: str, dtype: str, tied: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 1} | ({"moe_intermediate_size": 256} if "moe" in kind else {})
    model = save_model(tmp_path / "model", kind, **sizes, tie_word_embeddings=tied)
    base = LocalSampler(model, dtype=dtype).host.scheduler._runner.model
    copies = [one.packed for one in base.modules() if getattr(one, "packed", None) is not None]
    held = sum(torch.ops.mkldnn._nbytes(one) for one in copies)
    held += sum(one.nbytes for one in base.parameters())
    needs = MemoryNeeds(read_shape(str(model)), dtype, rank=4, cpu=True)
    assert needs.sampler(0) == pytest.approx(held, rel=0.01)


def test_a_mask_of_each_head_is_that_heads_own() -> None:
    """Some families add a bias per head: query heads that share keys do not share their masks."""
    layer: Any = torch.nn.Module()
    layer.fewest, layer.num_key_value_groups = 4, 2
    query, key, value = (torch.randn(3, heads, n, 8) for heads, n in ((4, 1), (2, 9), (2, 9)))
    mask = torch.randn(3, 4, 1, 9)
    got, _ = packed_attention(layer, query, key, value, mask)
    assert torch.equal(got, sdpa_attention_forward(layer, query, key, value, mask)[0])


def test_an_adapter_of_rank_one_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", model, 1, r=1)
    found: list[list[ChatReply]] = []
    for width in (1, 5):
        sampler = LocalSampler(model)
        sampler.load("a@1", adapter)
        calls = [ask("the mail", adapter="a@1", seed=i, max_tokens=8) for i in range(10)]
        found.append([r for i in range(0, 10, width) for r in sampler.chat(*calls[i : i + width])])
    assert _bits(found[0]) == _bits(found[1])

"""The token forest as the learner uses it: its parts, its memory, its fallback."""

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from langchain_art.errors import InvalidRequest
from langchain_art.wire import TrainConfig
from langchain_art_server.algorithms.sequences.prefix_forest import Forest, PartCosts, grow, split
from langchain_art_server.algorithms.sequences.training_rows import Row, forest_groups
from langchain_art_server.backends.models.base_weights import load_causal
from langchain_art_server.backends.models.delta_nets import delta_nets
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.forest import attention_flex
from langchain_art_server.backends.peft.forest.attention_tiles import Tiles
from langchain_art_server.backends.peft.forest.delta_nets import install
from langchain_art_server.backends.peft.forest.packing import FOREST_ATTENTION, ForestRows
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import CountedTokens, PaddedRows, Scorer
from langchain_art_server.backends.peft.packer import use_forest
from tests.support.learner_cases import (
    PLAIN_HEADS,
    SHAPE,
    VOCAB,
    branching_rows,
    contents,
    folder,
    fresh,
    make_rows,
    quiet,
    restricted,
    shake,
    take,
)
from tests.support.soak import in_soak_alone
from tests.support.tiny_models import DELTA_HEADS


@pytest.mark.parametrize("name", [in_soak_alone("qwen3"), in_soak_alone("gemma3"), "qwen3_next"])
def test_computing_layers_twice_changes_no_bit(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, results = branching_rows(40) + restricted(make_rows(6)), []
    for free in (1e12, 1.0):
        monkeypatch.setattr(packer, "free_bytes", lambda _device, free=free: free)
        core, here = LearnerCore(str(models[name])), folder(tmp_path, f"free{free}")
        start, out = shake(fresh(core, here)), folder(here, "out")
        core._hold(start)
        parts: Any = core.batch(rows, TrainConfig(tokens_per_microbatch=64)).packing
        assert {part.parent for part in parts._batches} > {-1}, "parts hang below others"
        metrics = take(core, start, out, rows, tokens_per_microbatch=64, optimizer_steps=2)
        assert metrics["checkpointed"] == float(free == 1.0)
        results.append(contents(out))
        assert [m for m in core.base.modules() if m.training] == [] or free == 1.0
    assert results[0] == results[1]


def test_checkpointing_needs_less_memory(tiny: str, tmp_path: Path) -> None:
    """CountedTokens in what autograd keeps, which is what the learner measures."""
    core = LearnerCore(tiny)
    core._hold(shake(fresh(core, tmp_path)))
    plain = core.packer._measured()
    # Of each layer at least: its input, four projections' inputs and three of the block behind.
    assert plain > 2 * 4 * (4 * 32 + 3 * 48)
    batch = core.batch(make_rows(3), TrainConfig())
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1] += tensor.numel()
        return tensor

    for on in (False, True):
        core.packer._keep(packer.Way.CHECKPOINT if on else packer.Way.PLAIN)
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            core.accumulate(batch, quiet)
    assert kept[1] < 0.3 * kept[0]


def test_terms_are_numbered_row_by_row_and_so_are_their_calls() -> None:
    rows = [
        Row([5, 6, 7, 8], [0, 1, 0, 1], [0, -1, 0, -2], [0.0] * 4, calls=[-1, 0, -1, 1]),
        Row([5, 6], [0, 0], [0.0] * 2, [0.0] * 2),
        Row([5, 6, 7], [0, 1, 1], [0, -3, -4], [0.0] * 3),
        Row([5, 6], [0, 1], [0, -5], [0.0] * 2, calls=[-1, 0]),  # the number of the call before it
    ]
    counted = CountedTokens.of(rows)
    assert counted.row_T.tolist() == [0, 0, 2, 2, 3]
    assert counted.at_T.tolist() == [1, 3, 1, 2, 1]
    assert counted.call_T.tolist() == [0, 1, 2, 2, 3]
    assert counted.column([row.logprobs for row in rows]).tolist() == [-1, -2, -3, -4, -5]
    everything = CountedTokens.of(rows, every_token=True)
    assert everything.row_T.tolist() == [0, 0, 0, 1, 2, 2, 3]
    assert everything.at_T.tolist() == [1, 2, 3, 1, 1, 2, 1]


def test_a_later_row_fills_what_the_next_one_leaves_of_a_budget() -> None:
    rows = [[first, *[9] * more] for first, more in enumerate((59, 64, 34, 39))]
    assert forest_groups(rows, 100) == [[0, 3], [1, 2]]  # 40 of the 40 that are left, not 35
    assert forest_groups([[1, 2, 3], [7, 7, 7], [1, 2, 4]], 4) == [[0, 2], [1]]
    # Its neighbour would be left with a copy of most of it.
    rows[2:] = [[2, *[9] * 30, last, 9, 9, 9] for last in (1, 2)]
    assert forest_groups(rows, 100) == [[0], [1, 2], [3]]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 40)).map(lambda row: [row[0]] * (1 + row[1]))
        | st.lists(st.integers(0, 2), min_size=1, max_size=40),
        max_size=12,
    ),
    st.integers(1, 60),
)
def test_groups_hold_each_row_once_and_no_more_than_the_budget(
    rows: list[list[int]], budget: int
) -> None:
    groups = forest_groups(rows, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(rows)))
    for group in groups:
        distinct = {(*rows[i][: n + 1],) for i in group for n in range(len(rows[i]))}
        assert len(distinct) <= budget or len(group) == 1


#: Part of the refusal; none: forests are right.
ATTENTIONS: dict[str, tuple[Any, str | None]] = {
    "gemma2": (
        transformers.Gemma2Config(**SHAPE, sliding_window=64, query_pre_attn_scalar=8),
        "softcap",
    ),
    "lfm2": (
        transformers.Lfm2Config(**PLAIN_HEADS, layer_types=["conv", "full_attention"]),
        "conv",
    ),
    # A window in its config and in its mask alone.
    "phimoe": (
        transformers.PhimoeConfig(**PLAIN_HEADS, sliding_window=7, num_local_experts=2),
        "windows are [None, None], its config's [7, 7]",
    ),
    "smollm3": (transformers.SmolLM3Config(**PLAIN_HEADS, no_rope_layers=[1, 0]), None),
    "phi3": (transformers.Phi3Config(**PLAIN_HEADS), None),
    "gpt2": (
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128),
        None,
    ),
}


def made(config: Any, where: Path, dtype: torch.dtype = torch.float32) -> Scorer:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(where)
    return Scorer(load_causal(str(where), dtype, torch.device("cpu")))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_plain_causal_attention_takes_forests_and_another_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    config, word = ATTENTIONS[name]
    scorer = made(config, tmp_path)
    why = use_forest(scorer)
    assert (why is None) == (word is None)
    if why is not None and word is not None:
        assert word in why
        assert scorer.base.config._attn_implementation in ("sdpa", "eager")
        with torch.no_grad():
            scorer.base(torch.arange(1, 9)[None], use_cache=False)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_beyond_a_change_of_the_rotary_positions_are_refused(
    kind: str, tmp_path: Path
) -> None:
    """One of them would change the positions of all tokens beside it."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    half = SHAPE["head_dim"] // 2
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
        rope["original_max_position_embeddings"] = 16
    config = transformers.LlamaConfig(
        **SHAPE | {"max_position_embeddings": 16 if kind == "dynamic" else 32},
        rope_parameters=rope,
    )
    made(config, tmp_path / "model")
    core = LearnerCore(str(tmp_path / "model"))
    rows = [Row([1] * n, [0] * (n - 1) + [1], [0.0] * n, [1.0] * n) for n in (3, 16, 17)]
    adapter = shake(fresh(core, tmp_path))
    alone = core.logprobs(adapter, rows[:1])[0]
    assert np.allclose(core.logprobs(adapter, rows[:2])[0], alone)
    with pytest.raises(InvalidRequest, match="max_model_len=16"):
        core.logprobs(adapter, rows)
    with pytest.raises(InvalidRequest, match="max_model_len=16"):
        take(core, adapter, folder(tmp_path, "out"), rows)


def test_a_cpu_takes_fewer_tokens_at_once_than_it_may(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = LearnerCore(tiny)
    core._hold(fresh(core, tmp_path))
    monkeypatch.setattr(packer, "CPU_TOKENS", 64)
    packing = core.batch(make_rows(30), TrainConfig()).packing
    assert packing.alive <= 64 < packing.tokens


def long_rows(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    rows: list[list[int]] = []
    for _ in range(rng.randint(2, 9)):
        start = rng.choice(rows)[: rng.randint(0, 400)] if rows else []
        rows.append(start + [rng.randrange(50) for _ in range(rng.randint(1, 300))])
    return rows


def with_images(forest: Forest) -> np.ndarray:
    """The last token of the image of each token: some are of images, others stand for themselves.

    An image is in one segment, with tokens before and behind it.
    """
    last = np.arange(len(forest.token_ids_N))
    for segment in forest.segments:
        start, end = segment.start + 1, segment.end - (segment.end - segment.start) // 3
        if segment.end - segment.start > 5:
            last[start:end] = end - 1
    return last


#: Seeds of forests with images; the odd ones of all have sinks.
IMAGES = (1, 2)


@pytest.mark.parametrize(
    ("seed", "window"),
    [
        *((2, 7), (3, None)),  # with images and a window, and with sinks
        *(in_soak_alone(*one) for one in itertools.product(range(4), (None, 1, 150))),
    ],
)
def test_tiles_and_flex_attention_equal_all_pairs_written_out(
    seed: int, window: int | None
) -> None:
    """Flex attention in float32 and forward: torch has no backward pass of it on CPU."""
    forest = grow(long_rows(seed))
    last_N = with_images(forest) if seed in IMAGES else None
    torch.manual_seed(seed)
    count = len(forest.token_ids_N)
    q, k, v = (torch.randn(1, heads, count, 16, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64) if seed % 2 else None
    for part in split(forest, [100, 700, 10_000, 300][seed]):
        own = torch.from_numpy(part.tokens_P)
        keys = torch.from_numpy(np.concatenate([part.above_E, part.tokens_P]))
        exits, depths = (torch.from_numpy(x) for x in (forest.exit_N, forest.depth_N))
        seen = (keys <= own[:, None]) & (own[:, None] < exits[keys])
        if last_N is not None:
            last = torch.from_numpy(last_N)[own]
            seen |= (own[:, None] < keys) & (keys <= last[:, None])
        if window is not None:
            seen &= depths[own][:, None] - depths[keys] < window
        found: list[list[torch.Tensor]] = []
        for tiled in (True, False):
            given = [x.requires_grad_() for x in (q[:, :, own], k[:, :, keys], v[:, :, keys])]
            if tiled:
                tiles = Tiles(part.tokens_P, part.above_E, forest, torch.float64, last_N)
                out = tiles.attend(given[0], given[1], given[2], 0.25, window, sinks)
            else:
                many_k, many_v = (x.repeat_interleave(2, 1) for x in given[1:])
                scores = (given[0] @ many_k.mT * 0.25).masked_fill(~seen, -torch.inf)
                one_more = torch.full((4,), -torch.inf).double() if sinks is None else sinks
                scores = torch.cat(
                    [scores, one_more[None, :, None, None].expand(1, 4, len(own), 1)], 3
                )
                out = (scores.softmax(3)[..., :-1] @ many_v).transpose(1, 2)
            grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
            found.append([out, *torch.autograd.grad(out, given, grad)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        blocks = attention_flex.Blocks(
            part.tokens_P, part.above_E, forest, torch.device("cpu"), last_N
        )
        with torch.no_grad():
            some = [x[:, :, at].float() for x, at in ((q, own), (k, keys), (v, keys))]
            flex = blocks.attend(*some, 0.25, window, None if sinks is None else sinks.float())
        torch.testing.assert_close(flex.double(), found[1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_flex_blocks_hold_all_pairs_and_whole_ones_no_others(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, flex attention reads its mask alone."""
    monkeypatch.setattr(attention_flex, "BLOCK", 16)
    forest, whole = grow(long_rows(seed)), 0
    for part in split(forest, 500):
        keys, q = np.concatenate([part.above_E, part.tokens_P]), part.tokens_P[:, None]
        some, every = attention_flex._blocks(part.tokens_P, keys, forest.exit_N[keys])
        pairs = (keys <= q) & (q < forest.exit_N[keys])
        for i, j in np.ndindex(*some.shape):
            block = pairs[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            assert some[i, j] or not block.any()
            assert block.all() or not every[i, j]
        whole += every.sum()
        assert (every <= some).all()
    assert whole > 0


DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **DELTA_HEADS,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
#: All of transformers' with such layers, but for `qwen4_exp`, whose tokens also depend on n-grams.
CONFIGS = {
    "Qwen3NextConfig": {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
    "Qwen3_5TextConfig": {},
    "Qwen3_5MoeTextConfig": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "OlmoHybridConfig": {},
    "LaraMiniConfig": {},
}


def scorer(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Scorer:
    return made(getattr(transformers, name)(**SHAPE | DELTA | CONFIGS[name]), folder, dtype)


def branching(seed: int, count: int, longest: int) -> list[Row]:
    """Rows that go on from places in others, many from the same, some from their first tokens."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    for _ in range(count):
        begun = rng.choice(rows) if rows else []
        begun = begun[: rng.choice([0, 1, 2, 3, len(begun) // 2, len(begun) - 1, len(begun)])]
        rows.append(begun + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))])
    return [
        Row(ids, [0] + [1] * (len(ids) - 1), [0.0] * len(ids), [0.0] * len(ids))
        for ids in rows
        if len(ids) > 1
    ]


def recurrent_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """``S ← S eᵍ + k (β (v - Sᵀk))ᵀ``, ``o = Sᵀq / √D``, with q and k of length 1."""
    times = value.shape[2] // key.shape[2]
    q, k = (x.repeat_interleave(times, 2) for x in (query, key))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = value.new_zeros(len(value), value.shape[2], q.shape[-1], value.shape[-1])
    found: list[Tensor] = []
    for at in range(value.shape[1]):
        state = state * g[:, at].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, at])
        write = (value[:, at] - read) * beta[:, at, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, at], write)
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, at]) * q.shape[-1] ** -0.5)
    return torch.stack(found, 1), None


# `test_images` has Qwen3.5's; all are compared in float32 by the test below.
@pytest.mark.parametrize(
    "name", [name if name == "Qwen3NextConfig" else in_soak_alone(name) for name in CONFIGS]
)
def test_a_forest_is_the_rows_one_by_one(
    name: str, tmp_path: Path, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs, and the gradient by all embeddings, in float64; each token is computed once."""
    one = scorer(name, tmp_path, torch.float64)
    one.base.set_experts_implementation("eager")  # the other one has no float64
    layers = delta_nets(one.base)
    module = vars(sys.modules[type(layers[0]).__module__])
    cases = [(branching(8, 14, 9), (8,)), (branching(102, 4, 90), (100, 10_000))]
    alone: list[tuple[Tensor, Tensor]] = []
    with monkeypatch.context() as patched:
        patched.setitem(module, "torch_chunk_gated_delta_rule", recurrent_rule)
        for rows, _ in cases:
            each: list[tuple[Tensor, Tensor]] = []
            for row in rows:
                counted = CountedTokens.of([row])
                padded = PaddedRows([row], counted, one.base)
                each.append(packer._both_passes(padded, one, counted))
            logprobs, gradients = zip(*each, strict=True)
            alone.append((torch.cat(logprobs), torch.stack(gradients).sum(0)))
    install(layers)
    one.base.set_attn_implementation(FOREST_ATTENTION)
    seen = list[int]()
    one.base.get_input_embeddings().register_forward_hook(
        lambda _module, args, _out: seen.append(args[0].numel())
    )
    for (rows, budgets), (expected, gradient) in zip(cases, alone, strict=True):
        counted = CountedTokens.of(rows)
        shown = [row.token_ids[:-1] for row in rows]
        distinct = {tuple(ids[: at + 1]) for ids in shown for at in range(len(ids))}
        for budget in budgets:
            seen.clear()
            forest = ForestRows(rows, counted, budget, float("inf"), one.base, PartCosts())
            found, of_forest = packer._both_passes(forest, one, counted)
            assert (found - expected).abs().max() < 1e-12
            assert ((of_forest - gradient).norm() / gradient.norm()).item() < 1e-12
            assert sum(seen) == len(distinct) and (len(seen) > 1) == (budget < 10_000)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_server_takes_forests_of_them(name: str, tmp_path: Path) -> None:
    assert use_forest(scorer(name, tmp_path)) is None

"""Packing of rows into micro-batches, and gradient checkpointing. Child side only.

Neither changes a result beyond rounding; both decide what a step costs in time and memory. Whether
a model supports token forests is read off its config and tested against padded rows: compared are
logprobs and, for the backward pass, the gradient by a vector that is added to all embeddings.
`ForestPass` sees to it that the attention ran in every layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from langchain_art.errors import InvalidRequest
from langchain_art.wire.choices import MAX_COUNT
from langchain_art.wire.policies import logprob_tolerance
from langchain_art_server.algorithms.sequences.prefix_forest import Ints, PartCosts
from langchain_art_server.algorithms.sequences.training_rows import Row, microbatches
from langchain_art_server.backends.models.base_weights import growing_rope, text_weights
from langchain_art_server.backends.models.delta_nets import delta_nets
from langchain_art_server.backends.models.device import free_bytes
from langchain_art_server.backends.peft.forest.attention_flex import LEAST
from langchain_art_server.backends.peft.forest.delta_nets import install
from langchain_art_server.backends.peft.forest.packing import (
    FOREST_ATTENTION,
    ForestRows,
    OddAttentionError,
    attention_widths,
    token_cost,
)
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    MicroBatches,
    Packing,
    PaddedRows,
    Scorer,
    number_dtype,
)
from langchain_art_server.backends.peft.recompute import Recompute

log = logging.getLogger(__name__)
#: Most tokens alive at once on a CPU: with more, less stays in its caches and a step is slower.
CPU_TOKENS = 3072
MPS_TOKENS = 16384  # the same on Apple's GPUs, of whose memory it is not known what is free
#: Share of the free memory that a backward pass may take; the rest is for logits and for gaps.
MEMORY_SHARE = 0.9
#: Layers whose activations are as large as what a backward pass takes of a GPU beside what it
#: keeps; an H200's peaks were 2.5 to 3.5 above (docs/gpu.md).
WORK = 3
HEAP = 1.5  # most bytes that a CPU's heap is expected to hold for each one that is kept
#: By kind of device (`PartCosts`): seconds of launches and beside, a layer and part, and operations
#: a second. Fitted to an H200's times of Qwen3-8B (docs/gpu.md). Without an entry, parts are free.
COSTS = {"cuda": (4.3e-3, 3.0e-3, 386e12)}


class Way(Enum):
    """Tensors kept for the backward pass, with the factors of the host's and the device's seconds.

    All; all but those that are cheap to compute again; each layer's input.
    """

    PLAIN = (1.0, 1.0)
    AGAIN = (1.13, 1.04)  # an estimate: of the kernels and of the elementwise traffic of a step
    CHECKPOINT = (1.5, 1.45)


class Packer:
    """Lays rows out for a model, and turns gradient checkpointing on where memory needs it.

    It sets the scorer's model up for forests if its attention supports them.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        scorer.plain_head = has_plain_head(scorer.base)
        self._rope = growing_rope(scorer.base.config.get_text_config())
        #: Why rows are padded and are no forest; None: they are a forest.
        self.padded_because = use_forest(scorer)
        self.layout = "padded rows"  # what rows are without a forest
        #: See `prefix_forest.grow`.
        self.token_cost = 0.0 if self.padded_because else token_cost(scorer.base)
        self.costs = part_costs(scorer.base, scorer.base.device.type)
        #: With gradient checkpointing, the inputs of layers are held in the host's memory.
        self.offload = False
        self._way = Way.PLAIN
        self.checkpoints = False  # gradient checkpointing is on for the last packing for training
        self.recompute = Recompute(scorer.base)  # what is cheap is computed again, where that is on
        self._shapes: object = None
        self._bytes_per_token: dict[Way, float] = {}
        self.share = 1.0  # part of the memory for activations that may be used
        self.alive = 0  # most tokens alive at a time in the last packing for training
        #: Bytes that activations may take, and those that the last packing's take.
        self._most_bytes = self._kept_bytes = float("inf")

    def pack(self, rows: Sequence[Row], counted: CountedTokens, budget: int) -> Packing:
        """Rows, if any, for forward passes with at most `budget` tokens alive at a time.

        Raises InvalidRequest: a row is so long that the model's rotary positions change. All tokens
        beside it, and its own that were sampled before, would be computed differently.
        """
        longest = max((len(row.token_ids) for row in rows), default=0)
        if self._rope is not None and longest > self._rope[1]:
            kind, most = self._rope
            raise InvalidRequest(
                f"got a row of {longest} tokens, expected at most {most}: above that the model's "
                f"{kind} rotary positions change, and no longer are what earlier calls were "
                f"sampled with. Start the server with max_model_len={most}."
            )
        if rows and self.padded_because is None:
            return self._forest(rows, counted, self._limit(budget))
        groups = self._padded_groups(rows, self._limit(budget))
        return MicroBatches([self._group(rows, counted, g) for g in groups], self._device)

    def pack_to_learn(self, rows: Sequence[Row], counted: CountedTokens, budget: int) -> Packing:
        """Rows for forward and backward passes, with gradient checkpointing if memory needs it.

        On a CPU the free memory decides on nothing else, so that the same rows give the same bits.
        On other devices micro-batches are small, or what is cheap is computed again (`Recompute`),
        or layers are: what costs least with as many tokens at once as memory then holds.
        """
        plain, on_cpu = self._measured(), self._device.type == "cpu"
        memory = min(self.share * MEMORY_SHARE * free_bytes(self._device), self._most_bytes)
        sizes = [self.peak(plain)]
        fits = int(min(memory / sizes[0], MAX_COUNT))
        packing = self.pack(rows, counted, budget if on_cpu else min(budget, max(fits, 1)))
        each, way = sizes[0], Way.CHECKPOINT if packing.alive > fits else Way.PLAIN
        if on_cpu:
            each = self.peak(self._checkpointed(plain)) if way is Way.CHECKPOINT else each
        elif self._most(float(len(packing.parts) > 1 or way is not Way.PLAIN)):
            sizes += map(self.peak, (self._measured(Way.AGAIN), self._checkpointed(plain)))
            most = [min(budget, max(int(memory / size), 1)) for size in sizes[1:]]
            found = [packing, *(self.pack(rows, counted, tokens) for tokens in most)]
            costs = [
                math.inf
                if one.alive * size > memory and kind is not Way.CHECKPOINT
                else self.costs.of(one.parts, kind.value)
                for one, size, kind in zip(found, sizes, Way, strict=True)
            ]
            costs = [self._most(cost) for cost in costs]
            index = costs.index(min(costs))
            packing, each, way = found[index], sizes[index], [*Way][index]
        if way is Way.CHECKPOINT and not self.checkpoints:
            log.warning(
                "%d tokens are alive at once and memory holds the activations of %d: gradient "
                "checkpointing is on, which computes each layer twice.",
                packing.alive,
                fits,
            )
        self._keep(way)
        self.alive, self._kept_bytes = packing.alive, packing.alive * each
        return packing

    def peak(self, kept: float) -> float:
        """Bytes that a backward pass takes of a token of which it keeps so many."""
        if self._device.type == "cpu":
            return HEAP * kept
        layers = self._scorer.base.config.get_text_config().num_hidden_layers
        return kept + WORK * self._measured() / layers

    def take_less(self) -> None:
        """Let activations take half of the last packing's memory, from now on: it ran out."""
        self._most_bytes = self._kept_bytes / 2

    @property
    def _device(self) -> torch.device:
        return self._scorer.base.device

    def _limit(self, budget: int) -> int:
        most = {"cpu": CPU_TOKENS, "mps": MPS_TOKENS}
        return min(budget, most.get(self._device.type, budget))

    def _padded_groups(self, rows: Sequence[Row], budget: int) -> list[list[int]]:
        return microbatches([len(row.token_ids) for row in rows], budget)

    def _group(
        self, rows: Sequence[Row], counted: CountedTokens, group: Sequence[int]
    ) -> tuple[Packing, Ints]:
        """Some of the rows as one micro-batch, and the numbers of its terms."""
        chosen = sorted(group)
        own, terms = counted.of_rows(chosen)
        some = [rows[index] for index in chosen]
        if self.padded_because is None:
            return self._forest(some, own, sum(len(row.token_ids) for row in some)), terms
        return self._without_forest(some, own), terms

    def _without_forest(self, rows: Sequence[Row], counted: CountedTokens) -> Packing:
        return PaddedRows(rows, counted, self._scorer.base, self._scorer.images)

    def _forest(self, rows: Sequence[Row], counted: CountedTokens, budget: int) -> ForestRows:
        base, images = self._scorer.base, self._scorer.images
        return ForestRows(rows, counted, budget, self.token_cost, base, self.costs, images)

    def restore(self) -> None:
        """Turn on what the last packing needs: other LoRA layers, put on since, turned it off."""
        self._keep(self._way)

    def _keep(self, way: Way) -> None:
        self._way, on, base = way, way is Way.CHECKPOINT, self._scorer.base
        self.checkpoints, self.recompute.on = on, way is Way.AGAIN
        self._scorer.offloads = on and self.offload
        if on and base.supports_gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        for module in base.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # Transformers checkpoints only in training; the layer's parts stay in eval.
                module.training = on

    def _measured(self, way: Way = Way.PLAIN) -> float:
        """Bytes of activations per token that a backward pass needs.

        Measured once per adapter shape, which is the same on all ranks, and so is the moment.
        """
        names = self._scorer.model.named_parameters()
        shapes = [(name, p.shape) for name, p in names if p.requires_grad]
        if self._shapes != shapes:
            self._shapes, self._bytes_per_token = shapes, {}
        if way not in self._bytes_per_token:
            self._keep(way)
            self._bytes_per_token[way] = self._measure()
        return self._bytes_per_token[way]

    def _checkpointed(self, plain: float) -> float:
        """Bytes per token with checkpointing, if a backward pass without it needs `plain`.

        They are those of the layer that is computed again, the inputs of all layers (unless
        the host holds them) and, in a forest, their keys and values, to which the parts below
        attend; of a delta net, the convolution's inputs.
        """
        config = self._scorer.base.config.get_text_config()
        _, keys = attention_widths(config)
        layers, deltas = config.num_hidden_layers, delta_nets(self._scorer.base)
        kept = 0.0 if self.offload else layers * config.hidden_size
        if self.padded_because is None:
            kept += (layers - len(deltas)) * 2 * keys
            kept += sum(layer.conv1d.in_channels for layer in deltas)
        return plain / layers + kept * self._scorer.base.dtype.itemsize

    def _most(self, number: float) -> float:
        """The highest of the ranks that pack together."""
        return number

    def _weights(self) -> set[int]:
        """Addresses of the model's weights, which are no activations."""
        return {p.untyped_storage().data_ptr() for p in self._scorer.model.parameters()}

    def _measure(self) -> float:
        # On a GPU attention pads to whole blocks: these need no padding.
        length = LEAST if self._device.type == "cuda" else 64
        row = Row([1] * length, [0] * (length - 1) + [1], [0.0] * length, [0.0] * length)
        known = self._weights()
        found: dict[int, torch.UntypedStorage] = {}
        held = list[int]()

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage
            return tensor

        def visit(_logprobs_T: Tensor, _terms_T: Tensor) -> None:
            held.append(sum(storage.nbytes() for storage in found.values()))

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.pack([row], CountedTokens.of([row]), length).sweep(self._scorer, visit)
        return max(1.0, sum(held) / length)


#: Most difference of the two gradients over their size, in a dtype of 32 bits or more.
GRADIENT_GAP = 1e-3
#: The same in 16 bits with three layers. Measured in bfloat16 there: 0.005 to 0.011 where the
#: attention is right, 0.17 to 0.57 where it ignores forests.
HALF_GAP = 0.05
#: Rows that share beginnings, as offsets from an arbitrary token; compared in parts of 8 tokens.
ROWS = [
    *([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9, 4, 4], [1, 3, 2, 5, 8], [6, 2, 1, 9])
]
BY_BLOCKS = {"cuda"}  # devices whose kernels take tokens by blocks of 128
#: Longer ones, for these: blocks with all pairs, some and none.
LONG_ROWS = [[*range(1, 301), *range(end, end + 150)] for end in (7, 8)]


def part_costs(base: PreTrainedModel, device: str) -> PartCosts:
    """Those of a model on a kind of device."""
    launches, beside, operations = COSTS.get(device, (0.0, 0.0, 1.0))
    layers = base.config.get_text_config().num_hidden_layers
    return PartCosts(layers * launches, layers * beside, 4 * text_weights(base) / operations)


def has_plain_head(base: PreTrainedModel) -> bool:
    """True if the output head alone makes the logits (no scaling or soft-capping behind it)."""
    scorer = Scorer(base)
    ids = torch.arange(1, 5, device=base.device)
    seen: list[torch.Tensor] = []
    hook = scorer.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        try:
            logits = base(input_ids=ids[None], use_cache=False).logits
        finally:
            hook.remove()
        return len(seen) == 1 and torch.allclose(scorer.head(seen[0]).float(), logits.float())


def use_forest(scorer: Scorer) -> str | None:
    """Set the model up for forests if its attention supports them; else why not, unchanged."""
    base = scorer.base
    why = excluded_by_config(base)
    if why is None and base.device.type not in ("cpu", "cuda"):
        why = f"there is no forest attention for {base.device.type}"
    if why is None:
        why = first_gap(base, partial(difference, scorer))
    if why is None:
        base.set_attn_implementation(FOREST_ATTENTION)
    return why


def first_gap(
    base: PreTrainedModel, compare: Callable[[Sequence[Sequence[int]], int], str | None]
) -> str | None:
    """The first difference that `compare` finds, or why a model cannot be compared; None: none.

    It gets rows, for the model's device, and most tokens of a part of a forest.
    """
    longest = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    long = ([row[:longest] for row in LONG_ROWS], 320)
    pairs = [(ROWS, 8), *([long] if base.device.type in BY_BLOCKS else [])]
    try:
        return next(filter(None, (compare(*pair) for pair in pairs)), None)
    except torch.OutOfMemoryError:
        raise  # not a property of the model
    except (OddAttentionError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        log.debug("Rows laid out otherwise do not fit the model.", exc_info=True)
        return str(error) or type(error).__name__


def difference(scorer: Scorer, offsets: Sequence[Sequence[int]], budget: int) -> str | None:
    """Difference of rows as a forest from padded rows beyond rounding; None: there is none.

    Leaves the model with the attention that it had, by which padded rows are computed.

    Raises OddAttentionError: the model does not run that attention, or asks more of it.
    """
    base = scorer.base
    install(delta_nets(base))
    before: Any = getattr(base.config, "_attn_implementation")  # noqa: B009 - its only name

    def forest(rows: Sequence[Row], counted: CountedTokens, _scorer: Scorer) -> Packing:
        base.set_attn_implementation(FOREST_ATTENTION)
        return ForestRows(rows, counted, budget, float("inf"), base, PartCosts())

    try:
        return gap_of(scorer, offsets, forest)
    finally:
        base.set_attn_implementation(before)


def gradient_bound(base: PreTrainedModel) -> float:
    """Most difference of two gradients over their size that rounding explains.

    In 16 bits each layer adds rounding errors of its own, so that it grows by the root of their
    number.
    """
    if base.dtype not in (torch.bfloat16, torch.float16):
        return GRADIENT_GAP
    return HALF_GAP * math.sqrt(max(1.0, base.config.get_text_config().num_hidden_layers / 3))


def gap_of(
    scorer: Scorer,
    offsets: Sequence[Sequence[int]],
    lay_out: Callable[[Sequence[Row], CountedTokens, Scorer], Packing],
) -> str | None:
    """Difference of rows laid out so from padded rows beyond rounding; None: there is none."""
    base, vocabulary = scorer.base, scorer.base.config.get_text_config().vocab_size
    rows = [_row(one, vocabulary) for one in offsets]
    counted = CountedTokens.of(rows)
    expected_T, expected_H = _both_passes(PaddedRows(rows, counted, base), scorer, counted)
    found_T, found_H = _both_passes(lay_out(rows, counted, scorer), scorer, counted)
    gap = (found_T - expected_T).abs().mean().item()
    if not gap <= logprob_tolerance(str(base.dtype).removeprefix("torch.")):
        return f"its logprobs differ by {gap:.3g} nats on average"
    gap = ((found_H - expected_H).norm() / expected_H.norm()).item()
    if not gap <= gradient_bound(base):
        return f"its gradients differ by {gap:.3g} of their size"
    return None


def _both_passes(
    packing: Packing, scorer: Scorer, counted: CountedTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of all terms (T), and the gradient of their sum by a shift of all embeddings (H)."""
    base, number = scorer.base, number_dtype(scorer.base)
    embeddings: Any = base.get_input_embeddings()
    found_T = torch.zeros(len(counted.row_T), dtype=number, device=base.device)
    shift_H = torch.zeros(embeddings.weight.shape[1], dtype=number, device=base.device)
    shift_H.requires_grad_()

    def visit(logprobs_T: torch.Tensor, terms_T: torch.Tensor) -> torch.Tensor:
        found_T[terms_T] = logprobs_T.detach()
        return logprobs_T.sum()

    def shift(_embeddings: Any, _ids: Any, out_BPH: torch.Tensor) -> torch.Tensor:
        return out_BPH + shift_H.to(out_BPH.dtype)

    hook = embeddings.register_forward_hook(shift)
    try:
        with torch.enable_grad():
            packing.sweep(scorer, visit)
    finally:
        hook.remove()
    if shift_H.grad is None:
        raise OddAttentionError("no gradient reaches its embeddings")
    return found_T, shift_H.grad


def excluded_by_config(base: PreTrainedModel) -> str | None:
    """Reason for which the config excludes several rows in one sequence, beyond a short test."""
    config = base.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    known = {"full_attention", "sliding_attention"}
    if kinds and len(delta_nets(base)) == list(kinds).count("linear_attention"):
        known.add("linear_attention")
    if kinds and not set(kinds) <= known:
        return f"it has layers of the kinds {sorted(set(kinds))}"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is chunked"
    if (rope := growing_rope(config)) is not None:
        return f"its rotary positions are {rope[0]}"
    return None


def _row(offsets: Sequence[int], vocab_size: int) -> Row:
    ids = [(7919 * offset) % vocab_size for offset in offsets]
    zeros = [0.0] * len(ids)
    return Row(ids, [0] + [1] * (len(ids) - 1), zeros, zeros)

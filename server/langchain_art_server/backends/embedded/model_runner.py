"""Forward passes over a batch of slots, or one sequence at a time for models that need it.

`make_runner` decides by the model's config and by a trial: if a padded batch over slots does not
give the logits of the plain model, sequences run one at a time, and a warning is logged.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from langchain_art.errors import ConfigError
from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.backends.embedded.batch_invariance import (
    BatchInvariance,
    batch_invariance,
)
from langchain_art_server.backends.embedded.delta_rule import SlotPass, takes_slots
from langchain_art_server.backends.embedded.kv_cache import Layout, SlotCache
from langchain_art_server.backends.models.base_weights import growing_rope

log = logging.getLogger(__name__)
_SLOTTED = {"full_attention", "sliding_attention", "linear_attention"}


class SlotsUnsupported(Exception):
    """The model keeps of a sequence what slots do not hold."""


class SlotRunner:
    """All rows in one padded forward pass, each at its own position, and known by its slot."""

    def __init__(
        self, model: Any, layout: Layout, *, max_slots: int, max_len: int, budget: int
    ) -> None:
        self.model = model
        config = model.config.get_text_config()
        self.device: torch.device = model.device
        kinds: set[str] = set(getattr(config, "layer_types", None) or ())
        self._mixed = len(kinds) > 1
        sliding = not kinds or "sliding_attention" in kinds
        #: Columns that sliding-window layers attend to, the query's own included; 0: none.
        self.window: int = (getattr(config, "sliding_window", None) or 0) if sliding else 0
        self._additive = config._attn_implementation != "sdpa"
        #: Sizes in which rows do not depend on each other; None: on this device or model they may.
        states = [shape for shape, _, _ in layout.states]
        self.invariance: BatchInvariance | None = batch_invariance(model, layout.shapes, states)
        self._multiple = self.invariance.multiple if self.invariance else 1
        if self.invariance is None and self.device.type == "cpu":
            log.warning(
                "%s: the tokens of a seed may differ with the calls that run beside it, since its "
                "attention (%s), layers or this machine's products add up in another order in each "
                "batch.",
                type(model).__name__,
                config._attn_implementation,
            )
        self.cache: SlotCache = SlotCache(
            layout,
            max_slots=max_slots,
            max_len=max_len,
            budget=budget,
            device=self.device,
            dtype=model.dtype,
            columns=self.invariance.length if self.invariance else int,
            spare=self._multiple - 1,
        )
        self._cache_name = _cache_name(model)
        self._last_only = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(
        self,
        first: int,
        starts: list[int],
        tokens: list[list[int]],
        shifts: Sequence[Ints | None] = (),
    ) -> Tensor:
        """Feed row i (slot ``first + i``) `tokens[i]`, from position `starts[i]` on.

        `shifts[i]` (4, T) are those of the tokens' images; see `Images.shifts`. Returns the logits
        after each row's last token, float32 ``[rows, vocab]``.
        """
        # Padded on the left, so that the rows' last tokens are aligned.
        width = max(map(len, tokens))
        if self.invariance is not None:
            width = self.invariance.width(width)
        pad = [width - len(row) for row in tokens]
        ids = torch.tensor([[0] * p + row for p, row in zip(pad, tokens, strict=True)])
        column = torch.arange(width)
        pads, start = torch.tensor(pad).unsqueeze(1), torch.tensor(starts).unsqueeze(1)
        positions = start + column - pads
        is_pad = column < pads
        # A padding token attends to the first column, so that no row of the softmax is empty, and
        # is written to the spare column after the longest sequence, which is never read.
        seen = positions.masked_fill(is_pad, 0)
        written = positions.masked_fill(is_pad, self.cache.capacity - 1)
        longest = max(s + len(row) for s, row in zip(starts, tokens, strict=True))
        to, moved, reach = self.device, None, None
        if any(one is not None for one in shifts):
            found = np.zeros((4, *ids.shape), np.int64)
            for row, one in enumerate(shifts):
                if one is not None:
                    found[:, row, pad[row] :] = one
            moved, reach = (
                torch.from_numpy(x).to(to) if x.any() else None for x in (found[:3], found[3])
            )
        return self._forward(
            first, ids.to(to), seen.to(to), written.to(to), longest, is_pad.to(to), moved, reach
        )

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        longest: int,
        first: int = 0,
        shifts: Tensor | None = None,
    ) -> Tensor:
        """Feed `tokens` ``[n]`` at `positions` ``[n]``, one for each slot from `first` on.

        The model reads positions that are `shifts` ``[n]`` from these, if there are some.
        """
        count, padding = len(tokens), None
        written = positions
        if missing := -count % self._multiple:
            # Rows of padding over slots behind, which stay as they are.
            spare = positions.new_full((missing,), self.cache.capacity - 1)
            padding = (torch.arange(count + missing, device=self.device) >= count).unsqueeze(1)
            written = torch.cat([positions, spare])
            tokens, positions = (torch.cat([x, x.new_zeros(missing)]) for x in (tokens, positions))
            shifts = None if shifts is None else torch.cat([shifts, spare * 0])
        ids, seen, written = (x.unsqueeze(1) for x in (tokens, positions, written))
        moved = None if shifts is None else shifts.unsqueeze(1)
        return self._forward(first, ids, seen, written, longest + 1, padding, moved)[:count]

    def _forward(
        self,
        first: int,
        ids: Tensor,
        positions: Tensor,
        written: Tensor,
        length: int,
        padding: Tensor | None,
        moved: Tensor | None,
        reach: Tensor | None = None,
    ) -> Tensor:
        if self.invariance is not None:
            length = self.invariance.length(length)
        self.cache.aim(first, written, length, padding)
        extra: dict[str, Any] = {"logits_to_keep": 1} if self._last_only else {}
        if self.cache.states:
            extra["slots"] = SlotPass(padding, by_tokens=self.invariance is not None)
        output = self.model(
            input_ids=ids,
            attention_mask=self._masks(positions, length, reach),
            position_ids=positions if moved is None else positions + moved,
            use_cache=True,
            **{self._cache_name: self.cache},
            **extra,
        )
        return output.logits[:, -1].float()

    def _masks(
        self, positions: Tensor, length: int, reach: Tensor | None
    ) -> Tensor | dict[str, Tensor | None]:
        columns = torch.arange(length, device=self.device)
        query = positions[:, None, :, None]
        full = columns <= (query if reach is None else query + reach[:, None, :, None])
        if not self.window and not self.cache.states:
            return self._mask(full)
        sliding = full & (query - columns < self.window) if self.window else full
        if not self._mixed:
            return self._mask(sliding)
        return {
            "full_attention": self._mask(full),
            "sliding_attention": self._mask(sliding),
            "linear_attention": None,
        }

    def _mask(self, visible: Tensor) -> Tensor:
        if not self._additive:
            return visible
        dtype = self.cache.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)


class SerialRunner:
    """One sequence at a time with the model's own cache: slow, but correct for any architecture."""

    cache = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device: torch.device = model.device
        self._state: dict[str, Any] = {}
        self._seen: list[int] = []
        self._shifts: Ints = np.zeros((3, 0), np.int64)
        self._takes = set(inspect.signature(model.forward).parameters)
        self._cache_name = _cache_name(model)

    def prefill(
        self,
        first: int,
        starts: list[int],
        tokens: list[list[int]],
        shifts: Sequence[Ints | None] = (None,),
    ) -> Tensor:
        """See `SlotRunner`."""
        if starts[0] == 0:
            self._state, self._seen, self._shifts = {}, [], self._shifts[:, :0]
        return self._feed(tokens[0], shifts[0])

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        longest: int,
        first: int = 0,
        shifts: Tensor | None = None,
    ) -> Tensor:
        """See `SlotRunner`."""
        moved = None if shifts is None else np.full((3, 1), shifts.item())
        return self._feed(tokens.tolist(), moved)

    def _feed(self, tokens: list[int], shifts: Ints | None) -> Tensor:
        self._seen += tokens
        new = np.zeros((3, len(tokens)), np.int64) if shifts is None else shifts[:3]
        self._shifts = np.concatenate([self._shifts, new], 1)
        fed = tokens if self._state else self._seen
        ids = torch.tensor([fed], device=self.device)
        extra: dict[str, Any] = dict(self._state)
        start = len(self._seen) - len(fed)
        if "position_ids" in self._takes:
            positions = torch.arange(start, len(self._seen))[None]
            if self._shifts.any():
                positions = positions + torch.from_numpy(self._shifts[:, None, start:])
            extra["position_ids"] = positions.to(self.device)
        output = self.model(input_ids=ids, use_cache=True, **extra)
        # A model that returns no state gets the whole sequence each time.
        state = output.get(self._cache_name) if self._cache_name in self._takes else None
        self._state = {} if state is None else {self._cache_name: state}
        return output.logits[:, -1].float()


def _cache_name(model: Any) -> str:
    """The argument that a model takes its state by: `cache` since transformers 5.24."""
    takes = inspect.signature(model.forward).parameters
    names = ("cache", "past_key_values", "cache_params")
    return next((name for name in names if name in takes), names[0])


def make_runner(
    model: Any, *, max_slots: int, max_len: int, exact: bool, budget: int
) -> SlotRunner | SerialRunner:
    """The fastest runner that computes this model correctly.

    At most `max_slots` sequences of up to `max_len` tokens run at once; `budget` is in bytes of
    keys and values. If not `exact`, `max_len` shrinks to what the budget has room for.

    Raises ConfigError: `budget` holds no sequence of `max_len` tokens.
    """
    try:
        layout = _layout(model)
        room = budget // layout.bytes_per_token(model.dtype) - 1 - layout.state_tokens(model.dtype)
        if room < (max_len if exact else 16):
            raise ConfigError(
                f"sampler.kv_cache_bytes={budget} holds {max(room, 0)} tokens, and one call may "
                f"need {max_len} (max_model_len); raise the former or lower the latter."
            )
        max_len = min(max_len, room)
        runner = SlotRunner(model, layout, max_slots=max_slots, max_len=max_len, budget=budget)
        _try(runner)
        return runner
    except SlotsUnsupported as reason:
        log.warning(
            "%s is decoded one sequence at a time, without a prefix cache: %s.",
            type(model).__name__,
            reason,
        )
        return SerialRunner(model)


def _layout(model: Any) -> Layout:
    config = model.config.get_text_config()
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    if kinds := kinds - _SLOTTED:
        raise SlotsUnsupported(f"it has layers of kind {', '.join(sorted(kinds))}")
    if (rope := growing_rope(config)) is not None:
        raise SlotsUnsupported(
            f"its rotary embedding ({rope[0]}) depends on the longest of a batch"
        )
    ids = torch.ones(1, 3, dtype=torch.long, device=model.device)
    cache = model(input_ids=ids, use_cache=True).get(_cache_name(model))
    layers: dict[int, tuple[Tensor, Tensor]] = {}
    nets: dict[int, tuple[Tensor, Tensor]] = {}
    for index, layer in enumerate(getattr(cache, "layers", ())):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if hasattr(layer, "conv_states") and keys is None:
            nets[index] = layer.conv_states[0], layer.recurrent_states[0]
            continue
        if hasattr(layer, "conv_states") or hasattr(layer, "recurrent_states"):
            raise SlotsUnsupported(f"layer {index} keeps keys and values beside its states")
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != 3:
            raise SlotsUnsupported(f"layer {index} keeps no keys and values")
        layers[index] = (keys, values)
    if not layers:
        raise SlotsUnsupported("it has no cache of keys and values")
    if not takes_slots(model, set(nets)):
        raise SlotsUnsupported("it keeps states that are not those of gated delta nets")
    return Layout.of(layers, nets)


def _try(runner: SlotRunner) -> None:
    """Compare a ragged batch over slots with the plain model: a prompt and one decoded token."""
    window = runner.window
    length = min(runner.cache.max_len - 1, window + 6 if 0 < window <= 64 else 13)
    generator = torch.Generator().manual_seed(0)
    vocab = runner.model.config.get_text_config().vocab_size
    rows = torch.randint(0, vocab, (2, length + 1), generator=generator).tolist()
    rows[1] = rows[1][: max(2, length // 2)]
    try:
        runner.cache.reserve(2, length + 1)
        prompts = [row[:-1] for row in rows]
        first = runner.prefill(0, [0, 0], prompts)
        last = torch.tensor([row[-1] for row in rows], device=runner.device)
        at = torch.tensor([len(row) - 1 for row in rows], device=runner.device)
        second = runner.decode(last, at, max(map(len, prompts)))
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise SlotsUnsupported(f"a trial over slots failed ({error})") from error
    finally:
        runner.cache.release()
    scale = 1e-3 if runner.model.dtype == torch.float32 else 0.1
    for index, row in enumerate(rows):
        ids = torch.tensor([row], device=runner.device)
        plain = runner.model(input_ids=ids, use_cache=False).logits[0, -2:].float()
        got = torch.stack([first[index], second[index]])
        if not torch.allclose(got, plain, atol=scale * float(plain.std()) + 1e-5, rtol=scale):
            raise SlotsUnsupported("a trial over slots gave other logits than the plain model")

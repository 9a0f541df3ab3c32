"""KV cache of running sequences in slots, behind the cache interface of transformers.

Every running sequence has one slot: a row of preallocated buffers. Decoded sequences are in slots
``0 … n-1``, so a forward pass reads a slice and copies nothing. Each row is written at its own
position, so that sequences of different lengths share a batch.

Shapes: a buffer is ``[entries, slots, heads, capacity, dim]``. An entry is one layer's keys or
values; entries with equal ``(heads, dim)`` share a buffer, so most models have exactly one.

Gated delta nets keep, per row, their convolution's last inputs and a recurrent state instead: the
buffers of states are ``[entries, slots, …]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

#: Smallest numbers of slots and of positions per slot.
_MIN_SLOTS, _MIN_CAPACITY = 4, 64
_KEPT_BYTES = 64 << 20  # buffers up to this size are kept when nothing runs


#: (buffer, entry) of a layer's one part, and of its other.
_Places = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """Places of each layer's keys and values, or states.

    Example: two layers with 2 key/value heads of 16 have one buffer with four entries::

        Layout(shapes=((2, 16),), entries=(4,), places={0: ((0, 0), (0, 1)), 1: ((0, 2), (0, 3))})
    """

    shapes: tuple[tuple[int, int], ...]  # per buffer, ``(heads, dim)``
    entries: tuple[int, ...]  # per buffer, how many entries it has
    places: dict[int, _Places]  # layer index -> (buffer, entry) of its keys and of its values
    states: tuple[tuple[tuple[int, ...], torch.dtype, int], ...] = ()
    """Per buffer of states, its shape of one entry and slot, its dtype, and its entries."""
    state_places: dict[int, _Places] = field(default_factory=dict[int, _Places])
    """Layer index -> (buffer, entry) of the convolution's inputs, and of the state."""

    @classmethod
    def of(
        cls, layers: dict[int, tuple[Tensor, Tensor]], nets: dict[int, tuple[Tensor, Tensor]]
    ) -> Layout:
        """The layout for what a model wrote for one prompt.

        Layer -> keys, values ``[1, H, T, D]``; or the convolution's inputs, the state ``[1, …]``.
        """
        counts: dict[tuple[int, int], int] = {}
        places = {
            index: (
                _place(counts, (keys.shape[1], keys.shape[3])),
                _place(counts, (values.shape[1], values.shape[3])),
            )
            for index, (keys, values) in layers.items()
        }
        kinds: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        state_places = {
            index: (
                _place(kinds, (tuple(inputs.shape[1:]), inputs.dtype)),
                _place(kinds, (tuple(state.shape[1:]), state.dtype)),
            )
            for index, (inputs, state) in nets.items()
        }
        states = tuple((*kind, count) for kind, count in kinds.items())
        return cls(tuple(counts), tuple(counts.values()), places, states, state_places)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of all layers' keys and values of one token."""
        numbers = sum(n * h * d for n, (h, d) in zip(self.entries, self.shapes, strict=True))
        return numbers * dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one sequence."""
        return sum(math.prod(shape) * dtype.itemsize * n for shape, dtype, n in self.states)

    def state_tokens(self, dtype: torch.dtype) -> int:
        """Tokens whose keys and values take at least as many bytes as the states of a sequence."""
        return -(-self.state_bytes // self.bytes_per_token(dtype))


class SlotCache(Cache):
    """Slots for running sequences; a forward pass writes into it as ``past_key_values``.

    The buffers take at most `budget` bytes, in which one sequence of `max_len` tokens must fit.
    They have as many columns as `columns` makes of the fewest that are needed, and `spare` slots
    behind those of sequences, even beyond the budget for that one sequence.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        max_slots: int,
        max_len: int,
        budget: int,
        device: torch.device,
        dtype: torch.dtype,
        columns: Callable[[int], int] = int,
        spare: int = 0,
    ) -> None:
        # Cache's constructor expects per-layer objects; this sets what it would.
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.layout, self.device, self.dtype = layout, device, dtype
        self.max_slots, self.max_len, self._spare = max_slots + spare, max_len, spare
        self._state_cells = layout.state_tokens(dtype)
        fewest = (1 + spare) * (columns(max_len + 1) + self._state_cells)
        #: Cells (slot x position) that the budget pays for; a slot's states are as some more.
        self.max_cells = max(budget // layout.bytes_per_token(dtype), fewest)
        self._columns = columns
        self.slots = self.capacity = 0
        self.buffers: list[Tensor] = []
        self.states: list[Tensor] = []
        self._first = self._last = self._length = 0
        self._targets: list[Tensor] = []
        self._pads: Tensor | None = None

    def reserve(self, slots: int, length: int) -> bool:
        """Make room for `slots` sequences of `length` tokens. False: the budget is too small.

        Padding is written to one more column.
        """
        wanted, slots, fits = _power(slots), slots + self._spare, self._columns(length + 1)
        if slots <= self.slots and fits <= self.capacity:
            return True
        if slots > self.max_slots:
            return False
        want_slots = min(self.max_slots, max(_MIN_SLOTS, wanted + self._spare, self.slots))
        want_length = min(self.max_len + 1, max(_MIN_CAPACITY, _power(length + 1)))
        want_length = max(self._columns(want_length), self.capacity)
        attempts = (want_slots, want_length), (slots, want_length), (slots, fits)
        for try_slots, try_length in attempts:
            if try_slots * (try_length + self._state_cells) <= self.max_cells:
                self._resize(try_slots, try_length)
                return True
        return False

    def shrink(self) -> None:
        """Free large buffers. No sequence may run."""
        if sum(one.nbytes for one in (*self.buffers, *self.states)) > _KEPT_BYTES:
            self.release()

    def release(self) -> None:
        """Free all memory. No sequence may run."""
        self.buffers, self.states, self.slots, self.capacity = [], [], 0, 0

    def _resize(self, slots: int, capacity: int) -> None:
        # Zeros: masked cells are multiplied by a weight of 0, and 0 x NaN is NaN.
        keep_slots, keep = min(slots, self.slots), min(capacity, self.capacity)
        for index, (heads, dim) in enumerate(self.layout.shapes):
            shape = (self.layout.entries[index], slots, heads, capacity, dim)
            new = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if index < len(self.buffers):
                new[:, :keep_slots, :, :keep] = self.buffers[index][:, :keep_slots, :, :keep]
            self.buffers[index : index + 1] = [new]
        if slots != self.slots:
            held = self.states
            self.states = [
                torch.zeros(count, slots, *shape, dtype=dtype, device=self.device)
                for shape, dtype, count in self.layout.states
            ]
            for new, old in zip(self.states, held, strict=False):
                new[:, :keep_slots] = old[:, :keep_slots]
        self.slots, self.capacity = slots, capacity

    def read(self, slot: int, length: int) -> list[Tensor]:
        """View ``[entries, H, length, D]`` of a slot's first tokens, per buffer."""
        return [buffer[:, slot, :, :length] for buffer in self.buffers]

    def read_states(self, slot: int) -> list[Tensor]:
        """View ``[entries, …]`` of a slot's states, per buffer."""
        return [buffer[:, slot] for buffer in self.states]

    def write(self, slots: Sequence[int], states: Sequence[Tensor]) -> None:
        """Write the same first tokens, as `read` returns them, to some slots."""
        for buffer, state in zip(self.buffers, states, strict=True):
            for slot in slots:
                buffer[:, slot, :, : state.shape[2]] = state

    def write_states(self, slots: Sequence[int], states: Sequence[Tensor]) -> None:
        """Write the same states, as `read_states` returns them, to some slots; none: zeros."""
        for at, buffer in enumerate(self.states):
            for slot in slots:
                buffer[:, slot] = states[at] if states else 0

    def move(self, moves: list[tuple[int, int]], length: int) -> None:
        """Copy slots to others, ``(source, target)``; `length` is that of the longest of them."""
        source, target = torch.tensor(moves, device=self.device).unbind(1)
        for buffer in self.buffers:
            view = buffer[:, :, :, :length]
            view[:, target] = view[:, source]
        for buffer in self.states:
            buffer[:, target] = buffer[:, source]

    def clear(self, slot: int) -> None:
        """Zero a slot that may have values that are not finite."""
        for buffer in (*self.buffers, *self.states):
            buffer[:, slot] = 0

    def aim(
        self, first: int, positions: Tensor, length: int, padding: Tensor | None = None
    ) -> None:
        """Set what the next forward pass writes and reads.

        The batch's rows are in the slots from `first` on. Its tokens are written to the columns
        `positions` ``[n, S]``, and attention reads the first `length` columns. A row begins with
        its `padding` ``[n, S]``, which leaves states as they are.
        """
        self._pads = None if padding is None else padding.sum(1)
        count = positions.shape[0]
        self._first, self._last, self._length = first, first + count, length
        self._targets = []
        slots = torch.arange(first, first + count, device=self.device).view(-1, 1, 1)
        for heads, _ in self.layout.shapes:
            head = torch.arange(heads, device=self.device).view(1, -1, 1)
            cells = (slots * heads + head) * self.capacity + positions.unsqueeze(1)
            self._targets.append(cells.view(-1))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values ``[n, H, S, D]``; returns those of all columns."""
        keys, values = self.layout.places[layer_idx]
        return self._put(keys, key_states), self._put(values, value_states)

    def _put(self, place: tuple[int, int], states: Tensor) -> Tensor:
        group, entry = place
        buffer = self.buffers[group][entry]
        buffer.view(-1, buffer.shape[-1]).index_copy_(
            0, self._targets[group], states.reshape(-1, states.shape[-1])
        )
        return buffer[self._first : self._last, :, : self._length]

    def _state(self, place: tuple[int, int]) -> Tensor:
        group, entry = place
        return self.states[group][entry, self._first : self._last]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: all passes use `update_conv_state`."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store a convolution's inputs ``[n, C, S]``; returns them behind K of those before.

        The earlier ones of a row stand directly before its first token, over its padding.
        """
        held = self._state(self.layout.state_places[layer_idx][0])
        taps = held.shape[-1]
        full = torch.cat([held, conv_states], dim=-1)
        if self._pads is not None:
            to = self._pads[:, None, None] + torch.arange(taps, device=self.device)
            full.scatter_(2, to.expand_as(held), held)
        held.copy_(full[..., -taps:])
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The states of a layer ``[n, …]``, to be overwritten or given to the next function."""
        return self._state(self.layout.state_places[layer_idx][1])

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store a layer's states."""
        held = self.get_recurrent_state(layer_idx)
        if recurrent_states.data_ptr() != held.data_ptr():
            held.copy_(recurrent_states)
        return held

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that attention reads; for models that build masks themselves."""
        return self._length


def _place(counts: dict[Any, int], kind: Any) -> tuple[int, int]:
    counts[kind] = counts.get(kind, 0) + 1
    return list(counts).index(kind), counts[kind] - 1


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()

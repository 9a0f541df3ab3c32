"""Unsloth's model under our loss: the one file that knows it. Child side only.

Only its public interface is used: `FastLanguageModel.from_pretrained` and `get_peft_model`, which
give a transformers model and PEFT layers with kernels of their own. Loss, rows, optimizer and files
are ours, so an adapter is the same whichever learner made it, up to rounding.

For a model whose attention takes no forest, rows are laid end to end in one sequence: Unsloth's
attention takes their lengths (``packed_seq_lengths``) and lets each row attend to itself alone.

Index suffixes: P positions of all rows end to end, T terms as in `logprob_scoring`.
"""

# ruff: noqa: I001 - Unsloth patches transformers and PEFT, so it is imported before them
from __future__ import annotations

from typing import Any, cast

from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

from collections.abc import Sequence

import numpy as np
import peft
import torch
import transformers
from torch import Tensor, nn

from langchain_art.errors import ConfigError
from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.models.base_weights import (
    base_outline,
    check_finite,
    in_four_bits,
    read_config,
)
from langchain_art_server.backends.peft.learner_core import LearnerCore, process_core
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    Packing,
    PaddedRows,
    Scorer,
)
from langchain_art_server.backends.peft.packer import Packer, excluded_by_config, first_gap, gap_of

MAX_MODEL_LEN = 32768  # context of a model whose config does not say


class UnslothCore(LearnerCore):
    """`LearnerCore` on a model that Unsloth loaded.

    On a GPU, where Unsloth's own attention does not support a forest, rows are padded; the reason
    is logged, and `metrics["forest"]` is 0. On a CPU its model is plain transformers.
    `max_model_len` are the tokens of the longest row; None: what the model's config allows.

    Raises ConfigError: the model cannot be loaded.
    """

    def __init__(self, *, max_model_len: int | None = None, **base: Any) -> None:
        self._longest = max_model_len
        super().__init__(**base)

    def _image_reader(self) -> str:
        return 'the learner "unsloth" learns from none; kind = "peft" in [learner] does'

    def _load(self) -> transformers.PreTrainedModel:
        try:
            base_outline(self.name, self.dtype)
            config = read_config(self.name)
            quantized = in_four_bits(config, self.name)
            if quantized and self.device.type != "cuda":
                raise ConfigError(
                    f"got a base in 4 bits for Unsloth on {self.device}, expected a CUDA device; "
                    'learn with kind = "peft"'
                )
            allowed = getattr(config.get_text_config(), "max_position_embeddings", MAX_MODEL_LEN)
            where: dict[str, Any] = {"device_map": {"": self.device}}
            loaded, _ = FastLanguageModel.from_pretrained(
                self.name,
                max_seq_length=self._longest or min(allowed, MAX_MODEL_LEN),
                dtype=self.dtype,
                load_in_4bit=quantized,  # the file's own numbers; the server compares them
                use_gradient_checkpointing=False,  # the packer decides when it is needed
                use_exact_model_name=True,  # else others of its own, in 4 bits even
                trust_remote_code=False,
                use_safetensors=True,
                **(where if self.device.type == "cuda" else {}),
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError) as error:
            raise ConfigError(f"Unsloth cannot load the model {self.name!r}: {error}") from error
        found = cast(transformers.PreTrainedModel, loaded)
        nn.Module.eval(found)
        check_finite(self.name, found.state_dict().items())
        return found.requires_grad_(False)

    def _forward(self) -> tuple[Scorer, Packer]:
        scorer = Scorer(self.base)
        # With a mask, its kernels attend to all pairs of a padded batch by a dense matrix.
        scorer.masked = self.device.type != "cuda"
        return scorer, UnslothPacker(scorer)

    def _with_lora(self, shape: peft.LoraConfig) -> peft.PeftModel:
        if shape.lora_dropout or shape.bias != "none":
            raise ValueError(
                f"got lora_dropout={shape.lora_dropout} and bias={shape.bias!r}, expected none"
            )
        targets = shape.target_modules or []
        try:
            dressed: Any = FastLanguageModel.get_peft_model(
                self.base,
                r=shape.r,
                lora_alpha=shape.lora_alpha,
                target_modules=[targets] if isinstance(targets, str) else sorted(targets),
                lora_dropout=0.0,
                bias="none",
                use_gradient_checkpointing=False,
                use_rslora=shape.use_rslora,
            )
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"Unsloth refuses LoRA on {sorted(targets)}: {error}; name other targets, or learn "
                "with kind = 'peft'"
            ) from error
        return dressed


def make_core(threads: int | None, **options: Any) -> UnslothCore:
    """The core of a process that does nothing else; see `UnslothCore` and `process_core`."""
    return process_core(lambda: UnslothCore(**options), threads)


class PackedRows(PaddedRows):
    """Rows, at least one, as one sequence of their lengths' sum."""

    def __init__(self, rows: Sequence[Row], counted: CountedTokens, scorer: Scorer) -> None:
        base = scorer.base
        lengths = np.array([len(row.token_ids) for row in rows])
        starts: Ints = np.cumsum(lengths) - lengths
        ids_P = np.concatenate([np.asarray(row.token_ids, np.int64) for row in rows])
        place_P = np.concatenate([np.arange(length) for length in lengths])
        place_T = starts[counted.row_T] + counted.at_T
        self._ids_P, self._place_P, self._lengths = (
            torch.from_numpy(x).to(base.device) for x in (ids_P, place_P, lengths.astype(np.int32))
        )
        self._predict(rows, counted, place_T, ids_P[place_T], base)
        self.tokens = self.alive = len(ids_P)
        self.parts = [self.tokens]

    def _inputs(self, scorer: Scorer) -> dict[str, Tensor]:
        return {
            "input_ids": self._ids_P[None],
            "position_ids": self._place_P[None],
            "packed_seq_lengths": self._lengths,
        }


class UnslothPacker(Packer):
    """A `Packer` that lays rows end to end where the model takes no forest but keeps rows apart."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        #: Why rows without a forest are padded and not laid end to end; None: they are laid so.
        self.apart_because = self._mixed() if self.padded_because else None
        if self.padded_because and self.apart_because is None:
            self.layout = "rows end to end"

    def _mixed(self) -> str | None:
        """Reason why rows in one sequence are not as each to itself, if they are not."""
        scorer = self._scorer
        return excluded_by_config(scorer.base) or first_gap(
            scorer.base, lambda offsets, _: gap_of(scorer, offsets, PackedRows)
        )

    def _padded_groups(self, rows: Sequence[Row], budget: int) -> list[list[int]]:
        lengths = [len(row.token_ids) for row in rows]
        return super()._padded_groups(rows, budget) if self.apart_because else fill(lengths, budget)

    def _without_forest(self, rows: Sequence[Row], counted: CountedTokens) -> Packing:
        if self.apart_because:
            return super()._without_forest(rows, counted)
        return PackedRows(rows, counted, self._scorer)


def fill(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows by groups of at most so many tokens: the longest first, each where there is room.

    A row longer than that goes alone. Example: ``fill([3, 9, 4, 6], 10)`` gives
    ``[[1], [3, 2], [0]]``.
    """
    groups: list[list[int]] = []
    sums: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        at = next((at for at, used in enumerate(sums) if used + length <= tokens), None)
        if at is None:
            groups.append([index])
            sums.append(length)
        else:
            groups[at].append(index)
            sums[at] += length
    return groups

"""The embedded learner's engine: one base model, one adapter on it at a time. Child side only.

Index suffixes as in `peft_forward`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from torch import Tensor, nn

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art_server.algorithms.loss import LossStats, clipped_loss, loss_stats, token_logprobs
from langchain_art_server.algorithms.samples import Row, microbatches
from langchain_art_server.algorithms.schedule import learning_rate
from langchain_art_server.backends import peft_adapter
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft_forward import (
    Batch,
    collate,
    load_base,
    selected_logits,
)
from langchain_art_server.backends.torch_setup import set_threads, torch_device

#: AdamW as is usual for LoRA in RL; β2 below the default 0.999, since runs have few steps.
ADAM_BETAS = (0.9, 0.99)
ADAM_EPS = 1e-8
#: Padded tokens at once where every position's logits are wanted, not just the trained ones'.
LOGPROB_TOKENS = 4096
#: float16 is left out: without loss scaling, small gradients would silently become zero.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

Progress = Callable[[float, str], None]


class PeftEngine:
    """Loads a base model and makes, trains and reads LoRA adapters on it.

    The adapter's weights and the optimizer's state are float32 (float64 on a float64 base)
    whatever the base's dtype. After a step, they stay in memory: if the next step begins from
    exactly those files, nothing is read again, and the numbers are the same to the bit.

    Args:
        model: hub name or local path.
        device: torch device; None: cuda, mps or cpu.
        dtype: float32, bfloat16 or float64; None: float32 on CPU, bfloat16 elsewhere.

    Raises:
        ConfigError: the model cannot be loaded, or device or dtype cannot be used.
    """

    def __init__(self, model: str, device: str | None = None, dtype: str | None = None) -> None:
        self.name = model
        self.device = torch_device(device)
        default = "float32" if self.device.type == "cpu" else "bfloat16"
        if (dtype or default) not in DTYPES:
            raise ConfigError(f"got dtype={dtype!r}, expected one of {sorted(DTYPES)} to learn in")
        self.dtype = DTYPES[dtype or default]
        self.base = load_base(model, self.dtype, self.device)
        ends = (self.base.get_input_embeddings(), self.base.get_output_embeddings())
        self._vocab_size = min(len(next(end.parameters())) for end in ends if end is not None)
        self._linears = peft_adapter.linear_names(self.base)
        self._peft: peft.PeftModel | None = None
        self._config = b""
        self._held: peft_adapter.Identity | None = None
        #: LoRA's parameters by their names on disk.
        self.parameters: dict[str, nn.Parameter] = {}
        self._optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])

    @property
    def info(self) -> dict[str, Any]:
        """What the parent wants to know of the base model."""
        return {
            "vocab_size": self._vocab_size,
            "parameters": sum(p.numel() for p in self.base.parameters() if not p.requires_grad),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def init_adapter(self, out: Path, lora: LoraConfig) -> None:
        """Write a fresh adapter, equal to the base, into the folder `out`.

        Raises:
            ConfigError: a target is not the name of a linear layer.
        """
        config = peft_adapter.peft_config(lora, self._linears)
        config.base_model_name_or_path = self.name
        self._put_on(peft_adapter.config_bytes(config))
        peft_adapter.initialise(self.parameters, lora.seed)
        peft_adapter.write_adapter(out, self._config, self.parameters)

    def step(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        """Take `request.config.updates` optimizer steps from one adapter to another.

        Means and maxima are over the trained tokens of all updates; `loss` and `grad_norm` (before
        clipping) are means over updates, token counts are sums over them; the ``logprob_gap``,
        learner against sampler, is that before the first update. If every advantage is 0, the
        adapter and its optimizer stay as they are: momentum of earlier steps must not move a
        policy that learned nothing.

        Raises:
            ArtError: the loss, the gradient or the result is not finite, or memory ran out;
                nothing was written, and the next step reads its parent from disk.
            ConfigError: the parent cannot be read.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        self._hold(request.parent)
        self._held = None  # until the new version is on disk, memory is no version at all
        try:
            metrics = self._learn(request, progress)
            for name, parameter in self.parameters.items():
                if not bool(parameter.isfinite().all()):
                    raise ArtError(
                        f"The step made {name!r} not finite; lower learning_rate "
                        f"(now {metrics['learning_rate']:g}). Nothing was published."
                    )
            peft_adapter.write_adapter(request.out, self._config, self.parameters, self._optimizer)
        except torch.OutOfMemoryError as error:
            raise ArtError(
                "The learner ran out of device memory; lower tokens_per_microbatch "
                f"(now {request.config.tokens_per_microbatch}). Nothing was published."
            ) from error
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._held = peft_adapter.identity(request.out)
        return metrics | {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
        }

    def logprobs(self, adapter: Path | None, rows: Sequence[Row]) -> list[np.ndarray]:
        """Per row, the logprob of each token given those before it (0.0 at index 0), in nats.

        Args:
            adapter: folder of an adapter; None is the base model.
            rows: only their tokens and temperature are read.
        """
        if adapter is not None:
            self._hold(adapter)
        found = [np.zeros(len(row.token_ids)) for row in rows]
        for group in microbatches([len(row.token_ids) for row in rows], LOGPROB_TOKENS):
            batch = self._collate([rows[i] for i in group], every_token=True)
            with torch.no_grad():
                logits_MV = self._logits(batch, base=adapter is None)
                flat = token_logprobs(logits_MV, batch.targets_M, batch.temperature_M).tolist()
            start = 0
            for i in group:
                end = start + len(rows[i].token_ids) - 1
                found[i][1:] = flat[start:end]
                start = end
        return found

    def accumulate(
        self, rows: Sequence[Row], config: TrainConfig, progress: Progress
    ) -> tuple[float, LossStats, int]:
        """Add the gradient of the whole batch's loss to the parameters, micro-batch by micro-batch.

        Returns:
            The loss, what the clip did, and the padded tokens that went through the model.
        """
        groups = microbatches([len(row.token_ids) for row in rows], config.tokens_per_microbatch)
        trained = sum(sum(row.mask) for row in rows)
        loss, stats, padded = 0.0, LossStats(), 0
        for index, group in enumerate(groups):
            batch = self._collate([rows[i] for i in group])
            logprobs_M = token_logprobs(self._logits(batch), batch.targets_M, batch.temperature_M)
            terms = (
                logprobs_M,
                batch.sampler_logprobs_M,
                batch.advantages_M,
                torch.ones_like(batch.targets_M),
                config.clip_low,
                config.clip_high,
            )
            part = clipped_loss(*terms, denominator=trained)
            part.backward()
            loss, stats = loss + part.item(), stats + loss_stats(*terms)
            padded += batch.ids_BT.numel()
            progress((index + 1) / len(groups), f"micro-batch {index + 1} of {len(groups)}")
        return loss, stats, padded

    def _collate(self, rows: Sequence[Row], *, every_token: bool = False) -> Batch:
        number = torch.float64 if self.dtype == torch.float64 else torch.float32
        return collate(rows, number, self.device, every_token=every_token)

    def _learn(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        config = request.config
        rows = [row for row in request.rows if any(row.mask)]
        rate = learning_rate(config, request.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        losses: list[float] = []
        norms: list[float] = []
        stats, first, processed = LossStats(), LossStats(), 0
        for update in range(config.updates):

            def report(fraction: float, message: str, done: int = update) -> None:
                progress((done + fraction) / config.updates, f"update {done + 1}, {message}")

            loss, found, padded = self.accumulate(rows, config, report)
            norm = nn.utils.clip_grad_norm_(
                list(self.parameters.values()), config.max_grad_norm, foreach=False
            ).item()
            _guard(loss, norm, found)
            if norm > 0:
                self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            norms.append(norm)
            stats, processed = stats + found, processed + padded
            first = first if update else found
        gaps = {k: v for k, v in first.metrics().items() if k.startswith("logprob_gap")}
        return {
            "loss": math.fsum(losses) / len(losses),
            "grad_norm": math.fsum(norms) / len(norms),
            "learning_rate": rate,
            **(stats.metrics() | gaps),
            "tokens_trained": stats.tokens,
            "tokens_processed": float(processed),
            "rows": float(len(rows)),
        }

    def _hold(self, folder: Path) -> None:
        """Make an adapter and its optimizer the ones in memory, unless they are."""
        found = peft_adapter.identity(folder)
        if found == self._held:
            return
        self._put_on(peft_adapter.read_config(folder))
        peft_adapter.load_weights(folder, self.parameters)
        peft_adapter.load_optimizer(folder, self.parameters, self._optimizer)
        self._held = found

    def _put_on(self, config: bytes) -> None:
        """Put LoRA layers of that shape on the base (if others are), with a fresh optimizer."""
        self._held = None
        if self._peft is None or config != self._config:
            try:
                shape = peft.LoraConfig(**json.loads(config) | {"inference_mode": False})
                if self._peft is not None:
                    self.base = self._peft.unload()
                    self._peft = None
                self._peft = peft.get_peft_model(self.base, shape).eval()
            except (TypeError, ValueError) as error:
                raise ConfigError(f"PEFT refuses the adapter's config: {error}") from error
            self._config = config
            self.parameters = {
                name.replace(".default", ""): parameter
                for name, parameter in self._peft.named_parameters()
                if parameter.requires_grad
            }
        self._optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            betas=ADAM_BETAS,
            eps=ADAM_EPS,
            weight_decay=0.0,
            foreach=False,
        )

    def _logits(self, batch: Batch, *, base: bool = False) -> Tensor:
        if self._peft is None:
            return selected_logits(self.base, self.base, batch)
        if not base:
            return selected_logits(self._peft, self.base, batch)
        with self._peft.disable_adapter():
            return selected_logits(self._peft, self.base, batch)


def serving_engine(
    model: str, device: str | None, dtype: str | None, threads: int | None
) -> PeftEngine:
    """An engine for a process that does nothing else: sets torch's threads and determinism.

    Args:
        model: hub name or local path.
        device: as for `PeftEngine`.
        dtype: as for `PeftEngine`.
        threads: torch threads; None: half of the cores, at least one.
    """
    set_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    engine = PeftEngine(model, device, dtype)
    # On CPU the same step must give the same bytes; on GPUs some kernels have no such variant.
    torch.use_deterministic_algorithms(engine.device.type == "cpu")
    return engine


def _guard(loss: float, norm: float, stats: LossStats) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    raise ArtError(
        f"The step was refused: got loss={loss} and gradient norm={norm}, expected finite numbers. "
        f"Learner and sampler are up to {stats.gap_max:.4g} nats apart on one token: if that is "
        "large, they do not run the same model or adapter. Nothing was published."
    )

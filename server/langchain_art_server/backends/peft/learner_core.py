"""Computations of the learner's process: one base model, one LoRA adapter on it at a time.

Child side only. Index suffixes as in `training_batch`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from langchain_art.errors import ArtError, ConfigError, InvalidRequest
from langchain_art.wire import LoraConfig, SFTConfig, StepConfig
from langchain_art_server.algorithms.loss.logprob_gap import Suspect, check_sync
from langchain_art_server.algorithms.loss.loss_stats import LossStats
from langchain_art_server.algorithms.loss.lr_schedule import rate_of_step
from langchain_art_server.algorithms.loss.objective import StepLoss
from langchain_art_server.algorithms.loss.own_loss import load_losses
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import Demonstration, LearnerStep, TokenTurn
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.models.adapter_files import identity
from langchain_art_server.backends.models.base_weights import check_causal, load_causal, weights_of
from langchain_art_server.backends.models.device import (
    default_dtype,
    free_cache,
    set_threads,
    torch_device,
)
from langchain_art_server.backends.models.images import Images, images_of
from langchain_art_server.backends.models.loading import eos_ids, known_tokens, load_tokenizer
from langchain_art_server.backends.peft import adapter_io
from langchain_art_server.backends.peft.adapter_io import HeldAdapter
from langchain_art_server.backends.peft.logprob_scoring import CountedTokens, Progress, Scorer
from langchain_art_server.backends.peft.packer import Packer
from langchain_art_server.backends.peft.training_batch import (
    LOGPROB_TOKENS,
    WHOLE,
    TrainingBatch,
    TrustRegion,
    Watched,
    probe,
    require_finite,
    step_tokens,
    sweep_logprobs,
    watch,
)

log = logging.getLogger(__name__)
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
#: Most attempts at one step while memory runs out; each has half of the activations.
MEMORY_ATTEMPTS = 6


def _measured(progress: Progress, done: float, _done: float, _said: str) -> None:
    progress(done, "measuring how far the step has moved the policy")


class LearnerCore(HeldAdapter):
    """Loads a base model, and makes, trains and reads LoRA adapters on it.

    The adapter's weights and the optimizer's state are float32 (float64 on a float64 base), also
    where LoRA is computed in 16 bits (`LoraWeights`). They stay in memory after a step: if the
    next step starts from exactly those files, nothing is read again, and the numbers are the same
    to the bit.

    Raises ConfigError: the model or a loss cannot be loaded, or device or dtype cannot be used.

    Args:
        model: hub name or local path.
        device: torch device; None: cuda, mps or cpu.
        dtype: a key of `DTYPES`; None: `default_dtype`.
        optimizer: ``adamw``, or ``adamw_8bit`` of bitsandbytes.
        offload_activations: see `Packer.offload`.
        losses: the operator's own, name -> ``MODULE:FUNCTION``.
    """

    def __init__(
        self,
        model: str,
        device: str | None = None,
        dtype: str | None = None,
        *,
        optimizer: str = "adamw",
        offload_activations: bool = False,
        losses: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(optimizer)
        self.name = model
        self._losses = load_losses(losses)
        self.device = torch_device(device)
        dtype = dtype or default_dtype(self.device)
        if dtype not in DTYPES:
            raise ConfigError(f"got dtype={dtype!r}, expected one of {sorted(DTYPES)} to learn in")
        self.dtype = DTYPES[dtype]
        self.base = self._load()
        self.info: dict[str, Any] = {  # facts of the base model for the parent
            "vocab_size": known_tokens(self.base),
            "parameters": self.base.num_parameters(),
            "weights": weights_of(self.base),
        }
        self._linears = adapter_io.linear_names(self.base)
        if not self._linears:
            raise ConfigError(
                f"The model {model!r} cannot be trained: by its config.json it is a "
                f"{type(self.base).__name__}, which has no torch.nn.Linear beside its head that "
                "could have LoRA; expected an architecture that has"
            )
        #: Or the reason why it reads none; before `_forward`, which changes the model.
        self._images = self._image_reader()
        self.info["no_images"] = self._images if isinstance(self._images, str) else ""
        self._scorer, self.packer = self._forward()
        if isinstance(self._images, Images):
            self._scorer.images = self._images
        self.packer.offload = offload_activations
        if self.packer.padded_because is not None:
            log.warning(
                "%s learns from %s, which compute common prefixes again: %s.",
                model,
                self.packer.layout,
                self.packer.padded_because,
            )

    def init_adapter(self, out: Path, lora: LoraConfig) -> None:
        """Write a new adapter, equal to the base, into a folder. Raises as `peft_config`."""
        config = adapter_io.peft_config(lora, self.base, self._linears)
        config.base_model_name_or_path = self.name
        self._put_on(adapter_io.config_bytes(config))
        adapter_io.initialise(self.parameters, lora.seed)
        self.rounded()
        adapter_io.write_adapter(out, self._config, self.parameters)

    def step(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        """Take `request.config.optimizer_steps` optimizer steps from one adapter to another.

        With `max_kl`, they end within the `TrustRegion`: ``updates`` is how many were taken,
        ``step_kl`` their KL(π_old ‖ π), ``step_kl_error`` its standard error (0 if it is measured
        on all tokens; else see `windows`), ``step_kept`` the share of the step that was kept.
        Means and maxima are over the trained tokens of all updates; `loss` and `grad_norm` (before
        clipping) are means over updates, token counts are sums over them; the ``logprob_gap``
        between learner and sampler is that before the first update. If the gradient is zero, as
        with zero variance of rewards, adapter and optimizer stay as they are: momentum of earlier
        steps must not move the policy. On a float16 base, an update whose gradient overflows is
        skipped and made again with half of the loss scale: ``overflows`` counts them. Of `seconds`,
        ``kl_seconds`` went to `max_kl` and ``save_seconds`` to the files.

        Raises:
            ArtError: learner and sampler are further apart than `max_logprob_gap`; the loss, the
                gradient or the result is not finite; or memory ran out however small the parts.
                Nothing was written, and the next step reads its parent from disk.
            ConfigError: the parent cannot be read.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            with self._seeing(request.rows):
                metrics = self._learn_within_memory(request, progress)
            if (name := adapter_io.not_finite(self.parameters)) is not None:
                raise ArtError(
                    f"The step made {name!r} not finite; lower learning_rate "
                    f"(now {metrics['learning_rate']:g}). Nothing was published."
                )
            saving = time.perf_counter()
            self._write(request.out)
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._held = identity(request.out)
        return metrics | {
            "seconds": time.perf_counter() - wall,
            "save_seconds": time.perf_counter() - saving,
            "cpu_seconds": time.process_time() - cpu,
        }

    def logprobs(
        self, adapter: Path | None, rows: Sequence[Row], progress: Progress | None = None
    ) -> list[np.ndarray]:
        """Logprob of each token given those before it, per row, in nats.

        0.0 at index 0 and for the tokens of images. Without the folder of an adapter, it is that of
        the base model. Of the rows, only tokens and temperature are read.
        """
        if adapter is not None:
            self._hold(adapter)
        counted = CountedTokens.of(rows, every_token=True)
        if not len(counted.row_T):
            return [np.zeros(len(row.token_ids)) for row in rows]
        with self._seeing(rows):
            base = adapter is None
            found_N = self._logprobs(rows, counted, progress, base=base).cpu().numpy()
        ends = np.cumsum([len(row.token_ids) for row in rows])
        flat, starts = np.zeros(ends[-1]), np.concatenate([[0], ends[:-1]])
        flat[starts[counted.row_T] + counted.at_T] = found_N
        return np.split(flat, ends[:-1])

    def batch(
        self,
        rows: Sequence[Row],
        config: StepConfig,
        reference: Path | None = None,
        progress: Progress | None = None,
    ) -> TrainingBatch:
        """Rows, each with a trained token, as micro-batches; for `reference`, see `LearnerStep`."""
        counted = CountedTokens.of(rows)
        packing = self.packer.pack_to_learn(rows, counted, config.tokens_per_microbatch)
        loss = StepLoss(step_tokens(rows, counted, self.base), config, self._losses)
        if not isinstance(config, SFTConfig) and config.divergence is not None:
            with self._base_only() if reference is None else self._bearing(reference):
                loss.reference_logprobs_N = sweep_logprobs(
                    packing, self._scorer, len(counted.row_T), progress
                )
            self.packer.restore()
        return TrainingBatch(rows, packing, loss)

    def accumulate(self, batch: TrainingBatch, progress: Progress) -> tuple[float, LossStats]:
        """Add the gradient of one update's loss to the parameters; returns loss and statistics.

        The gradient, not the loss that is returned, is multiplied by the loss scale.
        """
        batch.loss.begin_update()

        def visit(logprobs_T: Tensor, places_T: Tensor) -> Tensor:
            return self._scaler.scale(batch.loss.visit(logprobs_T, places_T))

        batch.packing.sweep(self._scorer, visit, progress)
        return batch.loss.loss, batch.loss.stats

    def watch(self, batch: TrainingBatch, all_rows: int, step: int) -> Watched:
        """A sample of the batch, which is `all_rows` or a rank's share of them."""
        return watch(batch, self.packer, all_rows, [step], 1)

    def moved(self, watched: Watched, progress: Progress | None = None) -> dict[str, float]:
        """See `Watched.moved`."""
        return watched.moved(self._scorer, progress)

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Work that one of several ranks may fail at, or be cancelled in; see `Ranks.together`."""
        return contextlib.nullcontext()

    def _say(self, progress: Progress, said: str) -> None:
        """Report between two sweeps that one is made again. Raises what `progress` does."""
        with self._together():
            progress(0.0, said)

    @contextlib.contextmanager
    def _seeing(self, rows: Sequence[Row]) -> Generator[None]:
        """Passes in it have the rows' images. Raises ArtError: this learner cannot read them."""
        bodies = {name: body for row in rows for name, body in row.images.items()}
        if not bodies:
            yield
            return
        if isinstance(self._images, str):
            raise ConfigError(f"got images, and the learner reads none: {self._images}")
        images = [self._images.read(name, body) for name, body in bodies.items()]
        self._images.hold(images)
        try:
            yield
        finally:
            self._images.let_go(images)

    def _image_reader(self) -> Images | str:
        return images_of(self.name, self.base)

    def _load(self) -> transformers.PreTrainedModel:
        base = load_causal(self.name, self.dtype, self.device)
        check_causal(self.name, base)
        return base

    def _forward(self) -> tuple[Scorer, Packer]:
        scorer = Scorer(self.base)
        return scorer, Packer(scorer)

    def _write(self, out: Path) -> None:
        scale = self._scaler.state_dict()
        adapter_io.write_adapter(out, self._config, self.parameters, self._optimizer, scale)

    def _update(self) -> None:
        with self._together():
            self._optimizer.step()
            self.rounded()

    def _overflowed(self) -> bool:
        """Take the loss scale off the gradient; true if that was too large, and is halved now.

        At a scale of 1 it is the gradient itself that is not finite.
        """
        before = self._scaler.get_scale()
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()
        return 1 < before > self._scaler.get_scale()

    def _shorten(
        self,
        region: TrustRegion,
        watched: Watched,
        moved: float | None,
        rate: float,
        progress: Progress,
    ) -> dict[str, float]:
        """Shorten a step that moved the policy by `moved` (None: as is to be measured)."""
        errors = [0.0]

        def measure() -> float:
            found = self.moved(watched, progress)
            if not math.isfinite(found["moved"]):
                raise ArtError(
                    f"The step made the policy's logprobs not finite; lower learning_rate (now "
                    f"{rate:g}). Nothing was published."
                )
            errors.append(math.sqrt(found["variance"]) / max(1.0, found["terms"]))
            return found["moved"] / max(1.0, found["terms"])

        moved, kept = region.shorten(measure() if moved is None else moved, measure)
        error = errors[-1] if kept else 0.0
        return {"step_kl": moved, "step_kl_error": error, "step_kept": kept}

    def _suspects(self, batch: TrainingBatch, progress: Progress) -> list[Suspect]:
        """Likely causes of the gap between learner and sampler, after the first update."""

        def score(rows: Sequence[Row], base: bool) -> Tensor:
            return self._logprobs(rows, CountedTokens.of(rows), progress, base=base)

        with self._together():
            return probe(batch, self.base, score)

    def _logprobs(
        self, rows: Sequence[Row], counted: CountedTokens, progress: Progress | None, *, base: bool
    ) -> Tensor:
        with self._base_only() if base else contextlib.nullcontext():
            packing = self.packer.pack(rows, counted, LOGPROB_TOKENS)
            return sweep_logprobs(packing, self._scorer, len(counted.row_T), progress)

    def _begin(self, request: LearnerStep) -> None:
        """Hold the parent. Until the new version is on disk, what is in memory is no version."""
        self.packer.share = 0.5 ** (request.attempt - 1)
        self._hold(request.parent)
        self._held = None
        if request.fresh_optimizer:
            self._optimizer.state.clear()
            self._scaler = adapter_io.loss_scaler(self.base)

    def _learn_within_memory(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        """`_learn`; where memory runs out, again from the parent and with smaller parts."""
        tried: list[tuple[int, bool]] = []
        while True:
            try:
                with self._together():
                    self._begin(request)
                return self._learn(request, progress)
            except torch.OutOfMemoryError as error:
                why = str(error)
            # Without the exception, whose frames hold activations.
            self._optimizer.zero_grad(set_to_none=True)
            gc.collect()
            free_cache()
            tokens, longest = self.packer.alive, max(len(row.token_ids) for row in request.rows)
            tried.append((tokens, self.packer.checkpoints))
            if len(tried) == MEMORY_ATTEMPTS or tried[-2:-1] == tried[-1:]:
                raise ArtError(
                    f"The learner ran out of device memory {len(tried)} times, at last with "
                    f"{tokens} tokens at once, for rows of at most {longest} tokens: {why}. Give "
                    "it more (docs/gpu.md) or lower max_model_len. Nothing was published."
                )
            said = f"out of memory with {tokens} tokens at once; again with fewer"
            log.warning("Step %d: %s. %s", request.step, said, why)
            self._say(progress, said)
            self.packer.take_less()

    def _learn(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        config = request.config
        rows = [row for row in request.rows if any(row.mask)]
        batch = self.batch(
            rows, config, request.reference, lambda _, part: progress(0.0, f"reference, {part}")
        )
        rate = rate_of_step(config, request.step)
        supervised = isinstance(config, SFTConfig)
        betas = adapter_io.adam_betas(
            adapter_io.SUPERVISED_MOMENTUM if supervised else config.momentum
        )
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = rate, betas
        losses, norms = list[float](), list[float]()
        stats = first = LossStats()
        updates, passes, taken, overflows = config.optimizer_steps, 0, 0, 0
        bound = None if supervised else config.max_kl
        region = None
        if bound is not None:
            region = TrustRegion(self.parameters.values(), bound, self.rounded)
        sweeps = updates + (region is not None)
        moved: float | None = None  # None: the parameters have changed since it was measured
        for update in range(updates):

            def report(fraction: float, message: str, done: int = update) -> None:
                progress((done + fraction) / sweeps, f"update {done + 1}, {message}")

            loss, found = self.accumulate(batch, report)
            while math.isfinite(loss) and self._overflowed():
                overflows, passes = overflows + 1, passes + 1
                self._optimizer.zero_grad(set_to_none=True)
                said = (
                    "the gradient overflowed float16: skipped, and made again with the loss scale "
                    f"{self._scaler.get_scale():g}"
                )
                log.warning("Step %d: %s.", request.step, said)
                self._say(report, said)
                loss, found = self.accumulate(batch, report)
            if update == 0:
                check_sync(
                    found.metrics(),
                    None if isinstance(config, SFTConfig) else config.max_logprob_gap,
                    request.staleness,
                    lambda: self._suspects(batch, report),
                )
            passes, moved = passes + 1, found.divergence
            if bound is not None and moved > bound:
                self._optimizer.zero_grad(set_to_none=True)
                break
            trained, most = list(self.parameters.values()), config.max_grad_norm
            foreach = adapter_io.all_at_once(trained)
            norm = nn.utils.clip_grad_norm_(trained, most, foreach=foreach).item()
            require_finite(loss, norm, found.gap_max, self.dtype)
            if norm > 0:
                self._update()
                taken, moved = taken + 1, None
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            norms.append(norm)
            stats = stats + found
            first = first if update else found
        reached: dict[str, float] = {}
        if region is not None:
            measuring = time.perf_counter()
            old_N, terms = batch.loss.old_logprobs_N, sum(sum(row.mask) for row in rows)
            watched = Watched(batch.packing, old_N, len(old_N))
            if terms > WHOLE:
                watched = self.watch(batch, len(rows), request.step)
            measured = partial(_measured, progress, updates / sweeps)
            reached = self._shorten(region, watched, moved, rate, measured)
            reached["kl_seconds"] = time.perf_counter() - measuring
        if self._scaler.is_enabled():
            reached |= {"loss_scale": self._scaler.get_scale(), "overflows": float(overflows)}
        gaps = {k: v for k, v in first.metrics().items() if k.startswith("logprob_gap")}
        return {
            "loss": math.fsum(losses) / len(losses),
            "grad_norm": math.fsum(norms) / len(norms),
            "learning_rate": rate,
            **(stats.metrics() | gaps),
            **reached,
            "updates": float(taken),
            "tokens_trained": stats.tokens,
            "tokens_processed": float(passes * batch.packing.tokens),
            "forest": float(self.packer.padded_because is None),
            "checkpointed": float(self.packer.checkpoints),
            "rows": float(len(batch.rows)),
        }


C = TypeVar("C", bound=LearnerCore)


def process_core(make: Callable[[], C], threads: int | None) -> C:
    """Make the core of a process of its own: sets torch's threads and determinism."""
    set_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    core = make()
    # On CPU the same step must give the same bytes; on GPUs some kernels have no such variant.
    torch.use_deterministic_algorithms(core.device.type == "cpu")
    return core


def token_turns(
    path: str,
    base: transformers.PreTrainedModel,
    turns: Sequence[Demonstration],
    template: str | None = None,
) -> list[TokenTurn | str]:
    """Tokenise replies, in the order given.

    Later turns of a conversation begin with the tokens of earlier ones; of a turn that cannot be
    rendered, the reason is returned. Nothing is kept between calls: the same turns give the same
    tokens. `path` is that of the tokenizer; for `template`, see `Settings.chat_template`.

    Raises ConfigError: the tokenizer cannot be read, or has no chat template.
    """
    tokenizer = load_tokenizer(path, template)
    chat = ChatTemplate(tokenizer, eos_ids(base, tokenizer))
    found: list[TokenTurn | str] = []
    for turn in turns:
        try:
            prompt = chat.prompt(turn.messages, turn.tools)
            reply = chat.reply_ids(prompt, turn.reply)
            chat.remember(prompt, reply, turn.reply)
            found.append(TokenTurn(prompt.ids, reply))
        except InvalidRequest as error:
            found.append(str(error))
    return found

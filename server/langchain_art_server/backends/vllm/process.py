"""Starts vLLM under a guard, watches it, and ends all of its processes as a group.

The socket is in a folder that only this user can enter; there is no port. The guard
(`process_guard`) ends the group when this process ends, even by a signal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.gpu_memory import (
    LEAST_CONTEXT,
    WIDTH,
    MemoryNeeds,
    Placement,
    Shape,
    VllmShare,
    vllm_share,
)
from langchain_art_server.backends.base import ModelInfo
from langchain_art_server.backends.models.loading import LoadedModel
from langchain_art_server.backends.vllm import process_guard
from langchain_art_server.backends.vllm.client import BASE, VllmClient, VllmError
from langchain_art_server.backends.vllm.sampler import parallel_sizes
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)
_GUARD = Path(process_guard.__file__)
_CPU_KV_CACHE_BYTES = 1 << 30
_POLL = 0.1
#: Bytes of vLLM's output that are searched for exceptions, how many of those are reported, and
#: lines of each. A failed start writes some 40,000 bytes of tracebacks.
_LAST_BYTES, _CAUSES, _CAUSE_LINES = 1 << 17, 6, 6
#: What stands before a line of vLLM's output: the process, and the logger's prefix.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?)?")
_FOR_BOTH = 'expected quantization = "nf4" in the settings, which is for both'
#: Options by which vLLM quantises weights by itself.
_QUANTIZES = {"--quantization", "-q", "--quantization-config"}
_WAKE_SECONDS = 60.0  # seconds in which it is asked to wake before it is ended
#: Words of vLLM's output when its engine cannot start, and seconds in which it has to end then:
#: the engine's process can hang at its exit (vLLM 0.32), and the API server waits for it.
_FAILED, _FAILED_SECONDS = b"EngineCore failed to start", 20.0
#: Seconds between health checks, seconds until one fails, and failures in a row that end vLLM: in
#: 28 s. A process of its group that was stopped is a failure too.
_HEALTH_EVERY, _HEALTH_WITHIN, _HEALTH_FAILURES = 4.0, 10.0, 2


def kept_slots(max_batch: int) -> int:
    """Rows of vLLM's batch beyond `max_batch`, for clients other than one that has as many."""
    return max(1, max_batch // 8)


class VllmProcess:
    """One run of vLLM. `folder`, which has the socket, is removed with the process.

    Adapters may have layers of the names `targets`, and a rank of up to `max_rank`, one of vLLM's.
    `replica` is its number if there are several.
    """

    def __init__(
        self,
        settings: Settings,
        info: ModelInfo,
        folder: Path,
        targets: list[str],
        max_rank: int,
        replica: int | None = None,
    ) -> None:
        assert settings.sampler.kind == "vllm"
        self._settings, self._options, self._info = settings, settings.sampler, info
        self._folder, self._socket = folder, folder / "vllm.sock"
        self._targets, self._max_rank = targets, max_rank
        self._on_cpu = info.device == "cpu"
        #: Whether vLLM shortens the context to what its cache holds.
        self.chooses_context = not self._on_cpu and settings.max_model_len is None
        name = "vllm" if replica is None else f"vllm-{replica}"
        self.log = settings.data_dir / f"{name}.log"
        self.client = VllmClient(self._socket)
        self._guard: asyncio.subprocess.Process | None = None
        self.pid = 0
        self.ended: asyncio.Task[int] | None = None

    def command(self) -> list[str]:
        """Command line of the process.

        Raises ConfigError: `[sampler] args` has an option of these, or one that quantises the base;
        or vLLM cannot compute with weights in 4 bits as it is to be started.
        """
        chosen = self._options
        options = {
            "--model": self._settings.model,
            "--served-model-name": BASE,
            "--uds": str(self._socket),
            "--dtype": self._info.dtype,
            "--max-model-len": "auto" if self.chooses_context else str(self._info.max_model_len),
            "--max-num-seqs": str(chosen.max_batch + kept_slots(chosen.max_batch)),
            # Not the model's generation_config, whose top_k and the like would apply by default.
            "--generation-config": "vllm",
            "--logprobs-mode": "processed_logprobs",
            "--structured-outputs-config": '{"backend": "guidance"}',
            "--max-loras": str(chosen.max_loras),
            # An evicted adapter is read from its folder again, which stays while it is loaded.
            "--max-cpu-loras": str(max(32, chosen.max_loras)),
            "--max-lora-rank": str(self._max_rank),
        }
        flags = ["--enable-lora", "--disable-uvicorn-access-log"]
        if not self._info.no_images:
            flags.append("--enable-scale-out")  # the route that takes images
            options["--mm-processor-kwargs"] = '{"backend": "pil"}'  # as the learner resizes them
            options["--max-logprobs"] = "21"  # see `with_images`
            # With it, calls at once of the same image fail now and then (vLLM 0.32).
            options["--mm-processor-cache-gb"] = "0"
        kv_cache = chosen.kv_cache_bytes
        if self._on_cpu:
            kv_cache = kv_cache or _CPU_KV_CACHE_BYTES
            # On a CPU, a seeded call with a chunked prefill ends vLLM (0.32).
            flags += ["--no-enable-chunked-prefill", "--enforce-eager"]
            options["--max-num-batched-tokens"] = str(max(16384, self._info.max_model_len))
        else:
            options["--gpu-memory-utilization"] = str(chosen.gpu_memory)
            if self._settings.take_turns:
                flags.append("--enable-sleep-mode")
        if kv_cache:
            options["--kv-cache-memory-bytes"] = str(kv_cache)
        ours = {*options, *flags, "--lora-target-modules", "--host", "--port", "--api-key"}
        ours |= {"--tokenizer", "--chat-template", "--trust-remote-code", "--max-logprobs"}
        ours.add("--config")  # a file of options
        # vLLM takes an underscore for a dash.
        names = {arg.partition("=")[0].replace("_", "-") for arg in chosen.args}
        if taken := sorted(names & ours):
            raise ConfigError(
                f"[sampler] args: got {taken}, which this server sets itself, so that what is "
                "recorded is what was sampled; leave them out, or use the settings of [sampler]."
            )
        self._check_numbers(names)
        if self._info.weights:
            options |= {"--quantization": "bitsandbytes", "--load-format": "bitsandbytes"}
        argv = [str(chosen.python), "-m", "vllm.entrypoints.openai.api_server"]
        argv += [part for pair in options.items() for part in pair] + flags
        return [*argv, "--lora-target-modules", *self._targets, *chosen.args]

    def _check_numbers(self, args: set[str]) -> None:
        """Raises ConfigError where vLLM would compute with other weights than the learner."""
        if taken := sorted(args & _QUANTIZES):
            raise ConfigError(
                f"[sampler] args: got {taken}, with which the sampler's weights would not be "
                f"the learner's; {_FOR_BOTH}."
            )
        if not self._info.weights:
            return
        if self._on_cpu:
            raise ConfigError(
                "got a base in 4 bits with vLLM on a CPU, expected a GPU: vLLM's bitsandbytes has "
                'kernels for GPUs alone. Sample with kind = "transformers", or leave quantization '
                "out."
            )
        if self._info.dtype != "bfloat16":
            raise ConfigError(
                f"got a base in 4 bits with vLLM in {self._info.dtype}, expected bfloat16, in "
                "which vLLM multiplies by 4-bit weights. On a GPU without it, sample with "
                'kind = "transformers".'
            )
        if split := sorted(args & {"--tensor-parallel-size", "-tp"}):
            raise ConfigError(
                f"[sampler] args: got {split} with a base in 4 bits, which vLLM cannot split; "
                "leave it out."
            )

    async def start(self) -> None:
        """Start it. Raises ConfigError, see `command`."""
        argv = self.command()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("wb") as log:
            guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(_GUARD), str(self._folder), *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment(),
            )
        self._guard = guard
        assert guard.stdout is not None
        self.pid = int(await guard.stdout.readline() or 0)
        self.ended = asyncio.create_task(self._wait(guard))

    async def ready(self) -> None:
        """Wait until it answers. Raises ConfigError with its last output if it does not."""
        assert self.ended is not None
        late = f"did not answer within {self._options.start_seconds:g} s"
        deadline = time.monotonic() + self._options.start_seconds
        while not self.ended.done() and time.monotonic() < deadline:
            if await self.client.healthy(_HEALTH_WITHIN):
                return
            if _FAILED in self._last_bytes() and deadline > time.monotonic() + _FAILED_SECONDS:
                late = f"did not end within {_FAILED_SECONDS:g} s of its engine's failure"
                deadline = time.monotonic() + _FAILED_SECONDS
            await asyncio.sleep(_POLL)
        why = f"ended with status {self.ended.result()}" if self.ended.done() else late
        raise ConfigError(
            f"vLLM ({self._options.python}) {why}. Its output is in {self.log}; it said:\n"
            f"{self.last_output()}"
        )

    async def fitted(self, info: ModelInfo) -> ModelInfo:
        """The model with the context that vLLM has room for. Raises VllmError."""
        if not self.chooses_context:
            return info
        context = min(info.max_model_len, await self.client.context())
        log.warning("Calls have up to %d tokens: max_model_len was left out.", context)
        return replace(info, max_model_len=context)

    async def watch(self, busy: Callable[[], bool]) -> None:
        """Return when it has ended. It is killed if it does not answer or was stopped.

        So it is if its count of tokens stays while it is `busy`.
        """
        assert self.ended is not None
        failures, tokens, since = 0, -1.0, time.monotonic()
        while failures < _HEALTH_FAILURES:
            await asyncio.wait([self.ended], timeout=_HEALTH_EVERY)
            if self.ended.done():
                return
            healthy = await self.client.healthy(_HEALTH_WITHIN)
            if not healthy or process_guard.is_stopped(self.pid):
                failures += 1
                continue
            failures = 0
            before, tokens = tokens, await self.client.tokens(_HEALTH_WITHIN)
            if tokens != before or not busy():
                since = time.monotonic()
            elif time.monotonic() - since > self._options.hang_seconds:
                break
        log.error("vLLM hangs and is ended.")
        self.kill()
        await self.ended

    async def wake(self) -> None:
        """Wake it, or end it: then it is started again, and awake. Raises VllmError."""
        try:
            await self.client.wake(_WAKE_SECONDS)
        except VllmError:
            log.exception("vLLM does not wake and is ended.")
            self.kill()
            raise

    def kill(self) -> None:
        """End the whole group at once."""
        if self.pid:
            process_guard.end(self.pid)

    def last_output(self) -> str:
        """The exceptions in its output, or its last lines if there are none."""
        log = self._last_bytes().decode(errors="replace") or "(nothing)"
        return "\n".join(root_causes(log)[:_CAUSES] or log.splitlines()[-8:])

    def _last_bytes(self) -> bytes:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
                return file.read()
        except OSError:
            return b""

    async def _wait(self, guard: asyncio.subprocess.Process) -> int:
        status = await guard.wait()
        if status < 0:  # the guard itself was killed
            self.kill()
        return status

    def _environment(self) -> dict[str, str]:
        """This process's environment, without what would make vLLM's Python import our packages."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        env |= {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # longer than our client keeps a connection
        }
        if self._settings.take_turns:  # its routes for sleeping exist in this mode only
            env["VLLM_SERVER_DEV_MODE"] = "1"
        if Path(self._settings.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        if self._on_cpu:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
            each = max(1, cores // 2 // self._options.replicas)
            env["OMP_NUM_THREADS"] = str(self._options.threads or each)
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the learner may use the same cores
            # Its sampler compiles a function of one line in spite of --enforce-eager: that takes
            # a C++ compiler and, for the first time on a machine, ten seconds.
            env["TORCH_COMPILE_DISABLE"] = "1"
        return env


def root_causes(log: str) -> list[str]:
    """The exceptions in vLLM's output, each once, the first one first.

    When one process ends, each process above it writes a traceback of its own; the last one says
    "See root cause above".
    """
    found: list[list[str]] = []
    inside, record, lines_left = False, "", 0
    for line in log.splitlines():
        prefix = match[0] if (match := _PREFIX.match(line)) else ""
        text = line[len(prefix) :]
        if text.startswith("Traceback (most recent call last)"):
            inside, lines_left = True, 0
        elif inside and text[:1].strip():
            inside, record, lines_left = False, prefix, _CAUSE_LINES - 1
            found.append([text])
        elif lines_left and prefix == record and text[:1] == " ":  # a message of several lines
            found[-1].append(text)
            lines_left -= 1
        else:
            lines_left = 0
    return list(dict.fromkeys("\n".join(lines) for lines in found))


#: The share where no GPU is listed by the driver's tool, or nothing fits by the estimate.
UNKNOWN_SHARE = 0.5
Cards = list[dict[str, Any]]  # the result of `gpu_memory.gpus`


def fill_in(settings: Settings, outline: LoadedModel, cards: Cards) -> tuple[Settings, LoadedModel]:
    """Settings with vLLM's share of the GPU, and the model with a context that fits beside it.

    `cards` are those before sampler and learner start, from the first of vLLM's on. All of several
    vLLMs get the same. On a CPU both results are as they were.
    """
    chosen, info = settings.sampler, outline.info
    assert chosen.kind == "vllm"
    if info.device == "cpu":
        return settings, outline
    found = _share(settings, info, outline.model.config, cards)
    if found is None:
        found = VllmShare(chosen.gpu_memory or UNKNOWN_SHARE, info.max_model_len)
    if chosen.gpu_memory is None:
        log.warning("vLLM gets %.1f %% of the GPU's memory.", 100 * found.gpu_memory)
        sampler = chosen.model_copy(update={"gpu_memory": found.gpu_memory})
        settings = settings.model_copy(update={"sampler": sampler})
    info = replace(info, max_model_len=found.context)
    return settings, replace(outline, info=info)


def _share(settings: Settings, info: ModelInfo, config: Any, cards: Cards) -> VllmShare | None:
    chosen, learner = settings.sampler, settings.learner
    assert chosen.kind == "vllm"
    parts, copies = parallel_sizes(chosen.args)
    serving = parts * copies * chosen.replicas
    if len(cards) < serving or info.dtype not in WIDTH:
        log.warning("The driver's tool lists %d GPUs: their memory is unknown.", len(cards))
        return None
    placement: Placement = "in turns" if settings.take_turns else "together"
    number = (settings.device or "").partition(":")[2]  # of the learner's GPU, or its first rank's
    if number.isdigit() and int(number) >= serving:
        placement = "separate"
    try:
        shape = Shape.of_config(config.to_dict())
    except (KeyError, TypeError) as error:
        log.warning("The model's config does not say its sizes: %r.", error)
        return None
    needs = MemoryNeeds(
        shape,
        info.dtype,
        settings.lora.rank,
        shards=learner.ranks if learner.kind == "peft" and learner.shard else 1,
        four_bits=bool(info.weights),
        offload=learner.offload_activations,
    )
    used = cards[:serving] if placement != "separate" else cards
    found = vllm_share(
        needs,
        placement,
        total=min(card["total"] for card in used),
        free=min(card["free"] for card in used),
        context=info.max_model_len,
        cards=parts,
        exact=settings.max_model_len is not None,
        given=chosen.gpu_memory,
    )
    if found is None:
        tokens = settings.max_model_len or LEAST_CONTEXT
        log.warning(
            "By the estimate, sampler and learner of %s do not fit into the GPU's memory %s with "
            "calls of %d tokens. `langchain-art doctor %s` says what each needs.",
            *(settings.model, placement, tokens, settings.model),
        )
    return found

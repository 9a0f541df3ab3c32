"""Checks whether this machine is ready to serve and train, and computes which models fit on it.

Nothing is changed. No torch here: the driver is asked by ``nvidia-smi``, and torch in a process of
its own, since a broken build can end the process that imports it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, Literal

from langchain_art import gpu_memory
from langchain_art.errors import ConfigError
from langchain_art.wire import LoraConfig, Wire
from langchain_art.wire.api_keys import key_problem

#: Sizes of published models (their config.json), shown if no model is given.
KNOWN = {
    "SmolLM2-135M": gpu_memory.Shape(30, 576, 1536, 576, 192, 49152, tied=True),
    "Qwen2.5-0.5B": gpu_memory.Shape(24, 896, 4864, 896, 128, 151936, tied=True),
    "Qwen3-1.7B": gpu_memory.Shape(28, 2048, 6144, 2048, 1024, 151936, tied=True),
    "Qwen3-4B": gpu_memory.Shape(36, 2560, 9728, 4096, 1024, 151936, tied=True),
    "Qwen3-8B": gpu_memory.Shape(36, 4096, 12288, 4096, 1024, 151936),
    "Qwen3-14B": gpu_memory.Shape(40, 5120, 17408, 5120, 1024, 151936),
    "Qwen3-32B": gpu_memory.Shape(64, 5120, 25600, 8192, 1024, 151936),
}
REQUIRED = ("torch", "transformers", "peft", "fastapi", "sqlalchemy")
OPTIONAL = ("vllm", "unsloth", "trl")
#: NVIDIA's oldest driver for CUDA 13.
LEAST_DRIVER = 580
#: The oldest compute capability of CUDA 13 (Turing).
LEAST_CAPABILITY = 7.5
#: Bytes of free disk for adapter versions, records and a model's download.
LEAST_DISK = 10 * 10**9
_TORCH = (
    "import json, torch; seen = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps({'cuda': torch.version.cuda, 'devices': seen}))"
)
_CPU_BUILD = (
    "It works, but its CUDA packages are gigabytes that nothing here uses. For the CPU build: pip "
    "install --force-reinstall --no-deps torch=={} --index-url https://download.pytorch.org/whl/cpu"
)
_ADVICE: dict[gpu_memory.Placement | None, str] = {
    "together": "",
    "in turns": "They fit if vLLM sleeps during a step: [sampler] and take_turns = true in the "
    "server's TOML file (docs/gpu.md).",
    "separate": 'They fit on a GPU each: device = "cuda:1" and [sampler] in the server\'s TOML '
    "file; with more GPUs, a vLLM on each of the others ([sampler] replicas) (docs/gpu.md).",
    None: "Take larger or several GPUs (--tensor-parallel-size in [sampler] args; [learner] ranks "
    "and shard = true), a smaller model, or a shorter --context (docs/gpu.md).",
}


class Finding(Wire):
    """The result of one check."""

    name: str
    found: str
    ok: bool | None = None
    """None: neither good nor bad."""
    advice: str = ""


class MemoryFit(Wire):
    """Memory that the sampler and the learner of one model need, beside what this machine has."""

    model: str
    parameters: int
    dtype: str
    quantization: Literal["nf4"] | None
    """``nf4``: the base is in 4 bits, since it does not fit otherwise."""
    sampler_bytes: int
    """Bytes with a cache for one call; calls for which it has no room wait."""
    learner_bytes: int
    """Needed by a step with one row of the asked context and gradient checkpointing."""
    placement: gpu_memory.Placement | None
    """The first that fits, None if none does."""


class DoctorReport(Wire):
    """All findings, and what models need."""

    findings: tuple[Finding, ...]
    device: str
    memory_bytes: int
    """Free, on each device."""
    context: int
    fits: tuple[MemoryFit, ...]

    @property
    def healthy(self) -> bool:
        """True if no check failed."""
        return all(finding.ok is not False for finding in self.findings)


def examine(
    model: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    data_dir: Path = Path("art-data"),
    context: int = 8192,
) -> DoctorReport:
    """Check this machine for a server at `host`, `port` and `data_dir`.

    `model` is a local path, or a hub name that is in the local cache (None: some known sizes), for
    calls and rows of up to `context` tokens, and adapters of the default rank.
    Raises ConfigError if its ``config.json`` is not here, or lacks one of its sizes.
    """
    shapes = KNOWN if model is None else {model: read_shape(model)}
    cards = gpu_memory.gpus()
    memory = min(card["free"] for card in cards) if cards else _free_memory()
    total = min((card["total"] for card in cards), default=memory)
    half = gpu_memory.half_precision(cards)
    fits = [
        fit(name, shape, len(cards), total, memory, context, half=half)
        for name, shape in shapes.items()
    ]
    findings = [_gpu(cards), _packages(), _torch(cards), *_learner(cards), _disk(data_dir)]
    findings += [_port(host, port), _key(host)]
    if model is not None:
        findings.append(_memory(fits[0], memory, len(cards)))
    return DoctorReport(
        findings=tuple(findings),
        device=cards[0]["name"] if cards else "CPU",
        memory_bytes=memory,
        context=context,
        fits=tuple(fits),
    )


def read_shape(model: str) -> gpu_memory.Shape:
    """The sizes of a model on this machine, from its ``config.json``; a `ConfigError` without."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots"
    for place in [Path(model, "config.json"), *sorted(cached.glob("*/config.json"))]:
        if place.is_file():
            try:
                return gpu_memory.Shape.of_config(json.loads(place.read_text()))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{place} does not say the model's sizes: {error!r}") from error
    raise ConfigError(
        f"got the model {model!r}, which is neither a folder with a config.json nor in {cached}; "
        "download it first, or leave it out to see what known sizes need"
    )


def _checked(name: str, found: str, problem: str = "") -> Finding:
    """A finding that is wrong if there is a problem, which its advice says."""
    return Finding(name=name, found=found, ok=not problem, advice=problem)


def _gpu(cards: list[dict[str, Any]]) -> Finding:
    if not cards:
        advice = "Small models work on the CPU. A GPU is found once `nvidia-smi` lists it."
        return Finding(name="GPU", found="none", advice=advice)
    found = "; ".join(
        f"{c['name']}, {c['free'] / 1e9:.0f} of {c['total'] / 1e9:.0f} GB free" for c in cards
    )
    found += f"; driver {cards[0]['driver']}"
    if gpu_memory.half_precision(cards) == "float16":
        found += "; no bfloat16, so models are served and trained in float16"
    if any(card["capability"] < LEAST_CAPABILITY for card in cards):
        problem = "CUDA 13, which requirements/gpu.txt is for, has no kernels for GPUs older than "
        problem += f"capability {LEAST_CAPABILITY}: install torch built for CUDA 12."
    elif int(cards[0]["driver"].partition(".")[0]) < LEAST_DRIVER:
        problem = (
            f"CUDA 13, which requirements/gpu.txt is for, needs driver {LEAST_DRIVER} or newer."
        )
    elif any(card["free"] < 0.8 * card["total"] for card in cards):
        problem = "Other processes have a fifth of its memory or more: see `nvidia-smi`."
    else:
        problem = ""
    return _checked("GPU", found, problem)


def _packages() -> Finding:
    found = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if found[name] is None]
    versions = ", ".join(f"{name} {found[name]}" for name in found if found[name])
    python = ".".join(map(str, sys.version_info[:3]))
    problem = f'A server here needs {", ".join(missing)}: pip install "langchain-art[local]"'
    return _checked(
        "packages", f"Python {python}; {versions or 'no engine'}", problem if missing else ""
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch(cards: list[dict[str, Any]]) -> Finding:
    if _version("torch") is None:
        return Finding(name="torch", found="not installed")
    done = _ask_torch()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return _checked("torch", last, "It cannot be imported: install it again.")
    seen = json.loads(done.stdout.splitlines()[-1])
    build = f"built for CUDA {seen['cuda']}" if seen["cuda"] else "built for CPUs"
    problem = (
        "There is a GPU, and torch does not see it: install the CUDA build "
        "(requirements/gpu.txt), or a newer driver."
    )
    unseen = bool(cards) and seen["devices"] == 0
    if seen["cuda"] and not cards:
        found, release = f"{build}, and there is no GPU", str(_version("torch")).partition("+")[0]
        return Finding(name="torch", found=found, advice=_CPU_BUILD.format(release))
    return _checked("torch", f"{build}, sees {seen['devices']} GPUs", problem if unseen else "")


def _learner(cards: list[dict[str, Any]]) -> list[Finding]:
    if not cards or _version("unsloth") is None:
        return []
    advice = (
        "[learner] kind = 'peft', the default, computes once what runs share (a system prompt, "
        "tools, a document). kind = 'unsloth' has faster kernels, and on most models computes it "
        "for each run. If runs share more than half of their tokens, take 'peft'; the log of "
        "Unsloth's first step says how many they share."
    )
    return [Finding(name="learner", found="PEFT and Unsloth are installed", advice=advice)]


@functools.cache
def _ask_torch() -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", _TORCH]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300)


def _disk(data_dir: Path) -> Finding:
    place = data_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    problem = f"Free {LEAST_DISK / 1e9:.0f} GB, or set --data-dir."
    found = f"{free / 1e9:.0f} GB free at {place}"
    return _checked("disk", found, problem if free < LEAST_DISK else "")


def _port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = "Take another --port, or end the process that listens there."
            return _checked("port", f"{host}:{port}: {error.strerror}", problem)
    return _checked("port", f"{host}:{port} is free")


def _key(host: str) -> Finding:
    key = os.environ.get("ART_API_KEY", "")
    local = host in ("localhost", "::1") or host.startswith("127.")
    if key:
        problem = (key_problem(key) or "").capitalize()
    else:
        problem = "" if local else "Set ART_API_KEY; make one with: langchain-art key new"
    reach = "loopback only" if local else "reachable from other machines"
    found = f"{'ART_API_KEY is set' if key else 'none'}; {host} is {reach}"
    return _checked("key", found, problem)


def fit(
    name: str,
    shape: gpu_memory.Shape,
    cards: int,
    total: int,
    free: int,
    context: int,
    rank: int = LoraConfig().rank,
    half: str = "bfloat16",
) -> MemoryFit:
    """The first placement that fits into so many GPUs with `free` bytes each, or into a CPU's.

    `half` is the GPUs' dtype.
    """
    dtype = half if cards else "float32"
    plain = needs = gpu_memory.MemoryNeeds(shape, dtype, rank, cpu=not cards)
    chosen: gpu_memory.Placement | None = None
    if not cards:
        needed = needs.sampler(context) + needs.step(context) + 2 * gpu_memory.PROCESS_BYTES
        chosen = "together" if needed <= free else None
    placements: tuple[gpu_memory.Placement, ...] = ("together", "in turns", "separate")
    ways = (plain, replace(plain, four_bits=True)) if shape.experts == 1 else (plain,)
    for way, placement in product(ways, placements[: min(cards, 2) + 1] if cards else ()):
        if gpu_memory.vllm_share(
            way, placement, total=total, free=free, context=context, exact=True
        ):
            needs, chosen = way, placement
            break
    return MemoryFit(
        model=name,
        parameters=shape.parameters,
        dtype=dtype,
        quantization="nf4" if needs.four_bits else None,
        sampler_bytes=needs.sampler(context),
        learner_bytes=needs.step(context),
        placement=chosen,
    )


def _memory(fit: MemoryFit, free: int, cards: int) -> Finding:
    program = gpu_memory.VLLM_BYTES if cards else gpu_memory.PROCESS_BYTES
    needed = [fit.sampler_bytes + program, fit.learner_bytes + gpu_memory.PROCESS_BYTES]
    sizes = " and ".join(f"{size / 1e9:.1f} GB" for size in needed)
    advice = _ADVICE[fit.placement]
    if fit.quantization:
        where = " with the embedded sampler" if fit.dtype == "float16" else ""
        advice = f'With quantization = "nf4" it fits{where} (docs/gpu.md). {advice}'.strip()
    return Finding(
        name="memory",
        found=f"{sizes} needed by sampler and learner, {free / 1e9:.1f} GB free"
        + (" on each GPU" if cards > 1 else ""),
        ok=fit.placement is not None,
        advice=advice,
    )


def _free_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""Is this machine ready to serve and train, and what fits on it? Looks, and changes nothing.

No torch here: the driver is asked by ``nvidia-smi``, and torch in a process of its own, since a
broken build of it can end the process that imports it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from langchain_art.diagnostics.memory_estimate import (
    CPU_HEAP,
    Shape,
    idle_learner_bytes,
    learner_bytes,
    longest,
    sampler_bytes,
)
from langchain_art.errors import ConfigError

#: Sizes of published models, for a machine that has none yet (their config.json).
KNOWN = {
    "Qwen2.5-0.5B": Shape(24, 896, 4864, 896, 128, 151936, tied=True),
    "Qwen3-1.7B": Shape(28, 2048, 6144, 2048, 1024, 151936, tied=True),
    "Qwen3-4B": Shape(36, 2560, 9728, 4096, 1024, 151936, tied=True),
    "Qwen3-8B": Shape(36, 4096, 12288, 4096, 1024, 151936),
    "Qwen3-14B": Shape(40, 5120, 17408, 5120, 1024, 151936),
    "Qwen3-32B": Shape(64, 5120, 25600, 8192, 1024, 151936),
}
NEEDED = ("torch", "transformers", "peft", "fastapi", "sqlalchemy")
WELCOME = ("vllm", "unsloth", "trl")
#: Bytes of an engine's process before it has a model: libraries, CUDA context, work space.
PROGRAM = 3 * 10**9 // 2
#: Over how many GPUs the learner's base may lie, to be looked at.
MOST_PARTS = 8
#: Free disk below which a run is likely to end: versions, records, a model's download.
LEAST_DISK = 10 * 10**9
MIN_KEY_LENGTH = 16
_TORCH = (
    "import json, torch; seen = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps({'cuda': torch.version.cuda, 'devices': seen}))"
)


class Finding(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    found: str
    ok: bool | None = None
    """None: neither good nor bad."""
    advice: str = ""


Way = Literal["beside", "in turns", "apart", "in parts"]


class Fit(BaseModel):
    """How sampler and learner of a model fit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    parameters: int
    dtype: str
    sampler_bytes: int
    learner_bytes: int
    """Of a step with one row of the asked context, layers computed twice."""
    way: Way | None
    """The first in which they fit, None if none. ``beside``: each other, on one device. ``in
    turns``: vLLM sleeps during a step (``take_turns``). ``apart``: on a GPU each (``device``).
    ``in parts``: as apart, the learner's base over several (``ranks``, ``shard``)."""
    devices: int
    """GPUs that this takes, all of one size; on a CPU 1; 0 if they do not fit."""
    longest_row: int
    """Tokens of the longest row that the learner could train that way; 0 if they do not fit."""


class DoctorReport(BaseModel):
    """Everything that was found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    findings: tuple[Finding, ...]
    device: str
    memory_bytes: int
    """Free, on each device."""
    context: int
    calls: int
    fits: tuple[Fit, ...]

    @property
    def healthy(self) -> bool:
        """Nothing that was looked at is wrong."""
        return all(finding.ok is not False for finding in self.findings)


def examine(
    model: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    data_dir: Path = Path("art-data"),
    context: int = 8192,
    calls: int = 16,
    rank: int = 16,
) -> DoctorReport:
    """Look at this machine.

    Args:
        model: a local path, or a hub name that is in the local cache; None: some known sizes.
        host: that the server would bind to.
        port: likewise.
        data_dir: where its data would be.
        context: tokens of a call, and of the longest row.
        calls: that are sampled at once.
        rank: of the adapter.

    Raises:
        ConfigError: the model's ``config.json`` is not here, or does not say its sizes.
    """
    shapes = KNOWN if model is None else {model: read_shape(model)}
    cards = gpus()
    findings = [_gpu(cards), *_versions(), _torch(cards), _disk(data_dir), _port(host, port)]
    findings.append(_key(host))
    memory = min(card["free"] for card in cards) if cards else _free_memory()
    dtype = "bfloat16" if cards else "float32"
    heap = 1.0 if cards else CPU_HEAP
    fits = tuple(
        fit(
            name,
            shape,
            memory,
            dtype,
            heap,
            context=context,
            calls=calls,
            rank=rank,
            gpu=bool(cards),
        )
        for name, shape in shapes.items()
    )
    if model is not None:
        findings.append(_fits(fits[0], memory, max(1, len(cards))))
    return DoctorReport(
        findings=tuple(findings),
        device=cards[0]["name"] if cards else "CPU",
        memory_bytes=memory,
        context=context,
        calls=calls,
        fits=fits,
    )


def fit(
    name: str,
    shape: Shape,
    memory: int,
    dtype: str,
    heap: float,
    *,
    context: int,
    calls: int,
    rank: int,
    gpu: bool = False,
) -> Fit:
    """How a model that is sampled from and trained fits into devices of `memory` bytes.

    `gpu`: there may be several of them, and the sampler can leave one to the learner for a step.
    """
    sampler = sampler_bytes(shape, context, calls, dtype)

    def learner(parts: int = 1) -> int:
        return learner_bytes(shape, context, rank, dtype, checkpointed=True, heap=heap, parts=parts)

    def row(budget: int, parts: int = 1) -> int:
        return longest(shape, budget, rank, dtype, heap, parts)

    idle = idle_learner_bytes(shape, rank, dtype)
    two, alone = memory - 2 * PROGRAM, memory - PROGRAM
    way: Way | None = None
    devices = reach = 0
    if sampler + learner() <= two:
        way, devices, reach = "beside", 1, row(two - sampler)
    elif gpu and max(sampler + idle, learner()) <= two:
        way, devices, reach = "in turns", 1, row(two)
    elif gpu and sampler <= alone:
        for parts in range(1, MOST_PARTS + 1):
            if learner(parts) <= alone:
                way, devices = "apart" if parts == 1 else "in parts", 1 + parts
                reach = row(alone, parts)
                break
    return Fit(
        model=name,
        parameters=shape.parameters,
        dtype=dtype,
        sampler_bytes=sampler,
        learner_bytes=learner(),
        way=way,
        devices=devices,
        longest_row=reach,
    )


def read_shape(model: str) -> Shape:
    """The sizes of a model on this machine.

    Raises:
        ConfigError: there is no ``config.json`` of it, or it does not say one of the sizes.
    """
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots"
    places = [Path(model, "config.json"), *sorted(cached.glob("*/config.json"))]
    for place in places:
        if place.is_file():
            try:
                return Shape.of_config(json.loads(place.read_text()))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{place} does not say the model's sizes: {error!r}") from error
    raise ConfigError(
        f"got the model {model!r}, which is neither a folder with a config.json nor in {cached}; "
        "download it first, or leave it out to see what known sizes need"
    )


def gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes and driver of each NVIDIA GPU, as the driver's own tool says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    argv = [tool, query, "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    rows = [line.split(", ") for line in done.stdout.splitlines()] if not done.returncode else []
    return [
        {"name": name, "total": int(total) << 20, "free": int(free) << 20, "driver": driver}
        for name, total, free, driver in rows
    ]


def _gpu(cards: list[dict[str, Any]]) -> Finding:
    if not cards:
        return Finding(
            name="GPU",
            found="none",
            advice="The embedded engines work on the CPU, for small models. With a GPU in this "
            "machine, install its driver until `nvidia-smi` lists it.",
        )
    said = "; ".join(
        f"{c['name']}, {c['free'] / 1e9:.0f} of {c['total'] / 1e9:.0f} GB free" for c in cards
    )
    busy = any(card["free"] < 0.8 * card["total"] for card in cards)
    advice = "Another process has a fifth of its memory or more: see `nvidia-smi`." if busy else ""
    return Finding(
        name="GPU", found=f"{said}; driver {cards[0]['driver']}", ok=not busy, advice=advice
    )


def _versions() -> list[Finding]:
    found = {name: _version(name) for name in (*NEEDED, *WELCOME)}
    missing = [name for name in NEEDED if found[name] is None]
    said = ", ".join(f"{name} {found[name]}" for name in found if found[name])
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        Finding(
            name="packages",
            found=f"Python {python}; {said or 'no engine'}",
            ok=not missing,
            advice=f'A server here needs {", ".join(missing)}: pip install "langchain-art[local]"'
            if missing
            else "",
        )
    ]


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
        advice = "It does not import; install it again: pip install --force-reinstall torch==2.13.0"
        return Finding(name="torch", found=last, ok=False, advice=advice)
    seen = json.loads(done.stdout.splitlines()[-1])
    build = f"built for CUDA {seen['cuda']}" if seen["cuda"] else "built for CPUs"
    lost = len(cards) > 0 and seen["devices"] == 0
    return Finding(
        name="torch",
        found=f"{build}, sees {seen['devices']} GPUs",
        ok=not lost,
        advice="There is a GPU, and torch does not see it: install the CUDA build "
        "(requirements/gpu.txt), or a driver that is new enough for it."
        if lost
        else "",
    )


@functools.cache
def _ask_torch() -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", _TORCH]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300)


def _disk(data_dir: Path) -> Finding:
    place = data_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return Finding(
        name="disk",
        found=f"{free / 1e9:.0f} GB free at {place}",
        ok=free >= LEAST_DISK,
        advice="" if free >= LEAST_DISK else f"Free {LEAST_DISK / 1e9:.0f} GB, or set --data-dir.",
    )


def _port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "Take another --port, or end what listens there (a server that is up?)."
            found = f"{host}:{port}: {error.strerror}"
            return Finding(name="port", found=found, ok=False, advice=advice)
    return Finding(name="port", found=f"{host}:{port} is free", ok=True)


def _key(host: str) -> Finding:
    key = os.environ.get("ART_API_KEY", "")
    local = host == "localhost" or host.startswith("127.") or host == "::1"
    short = 0 < len(key) < MIN_KEY_LENGTH
    ok = not short and (local or bool(key))
    said = "ART_API_KEY is set" if key else "none"
    advice = (
        "Set ART_API_KEY to at least 16 characters: "
        "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
    )
    reach = "loopback only" if local else "reachable from other machines"
    return Finding(
        name="key", found=f"{said}; {host} is {reach}", ok=ok, advice="" if ok else advice
    )


_HOW: dict[Way | None, str] = {
    "beside": "",
    "in turns": "They fit if vLLM sleeps while the learner learns: take_turns = true, and "
    'kind = "vllm" under [sampler], in the server\'s TOML file',
    "apart": 'They fit on two GPUs: device = "cuda:1" in the server\'s TOML file',
    "in parts": "They fit on {devices} GPUs, the learner's base in parts on {parts} of them: "
    'device = "cuda:1", and under [learner] ranks = {parts} and shard = true',
    None: "Take a smaller model, fewer --calls or a shorter --context, or load it in 4 bits",
}


def _fits(one: Fit, memory: int, devices: int) -> Finding:
    need = one.sampler_bytes + one.learner_bytes + 2 * PROGRAM
    each = " on each GPU" if devices > 1 else ""
    advice = _HOW[one.way].format(devices=one.devices, parts=one.devices - 1)
    return Finding(
        name="memory",
        found=f"{need / 1e9:.1f} GB needed, {memory / 1e9:.1f} GB free{each}",
        ok=0 < one.devices <= devices,
        advice=f"{advice} (docs/gpu.md)." if advice else "",
    )


def _free_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

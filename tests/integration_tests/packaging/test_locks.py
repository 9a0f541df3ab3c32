"""The lock files hold what pyproject.toml allows, and nothing that it does not know of."""

import re
import tomllib
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.live_server import REPO

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PIN = re.compile(r"([a-z0-9.-]+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})\n")
#: Environments that the locks are for.
LINUX = {"python_version": "3.11", "sys_platform": "linux", "platform_machine": "x86_64"}


def pins(extra: str) -> dict[str, str]:
    text = (REPO / f"requirements/{extra}.txt").read_text()
    rest = PIN.sub("", text)
    assert all(line.startswith("#") for line in rest.splitlines()), rest
    found = [(canonicalize_name(name), version) for name, version, _ in PIN.findall(text)]
    assert len(found) == len(dict(found)), "a package is pinned twice"
    return dict(found)


def wanted(extra: str) -> list[Requirement]:
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    todo = [extra]
    while todo:
        for line in PROJECT["optional-dependencies"][todo.pop()]:
            one = Requirement(line)
            if one.name == PROJECT["name"]:
                todo += one.extras
            else:
                found.append(one)
    return [one for one in found if one.marker is None or one.marker.evaluate(LINUX)]


def test_no_lock_has_what_stole_credentials() -> None:
    """litellm 1.82.7 and 1.82.8 on PyPI, in March 2026: the proxy is a client, not a dependency."""
    assert all("litellm" not in pins(lock) for lock in ("gpu", "local", "build"))


def test_what_builds_the_wheel_is_locked() -> None:
    held = pins("build")
    for one in map(Requirement, PYPROJECT["build-system"]["requires"]):
        assert one.specifier.contains(held[canonicalize_name(one.name)])


def test_what_torch_needs_on_a_cpu_is_locked_beside_it() -> None:
    """PyTorch's index is asked for torch alone, whose wheels there have no hash in the locks."""
    needed = [Requirement(line) for line in requires("torch") or []]
    held = pins("local")
    for one in needed:
        if one.marker is None or one.marker.evaluate(LINUX | {"extra": ""}):
            name = canonicalize_name(one.name)
            cuda = name.startswith(("nvidia-", "cuda-", "triton"))  # not of the CPU build
            assert cuda or one.specifier.contains(held[name]), one


@pytest.mark.parametrize("extra", ["gpu", "local"])
def test_a_lock_is_within_the_ranges(extra: str) -> None:
    held = pins(extra)
    torch = (REPO / "requirements/torch-cpu.txt").read_text().rsplit("torch==", 1)[1].strip()
    held = {"torch": torch} | held  # of the local lock, the one for a CPU
    for one in wanted(extra):
        version = held.get(canonicalize_name(one.name))
        assert version is not None, f"{one} is not in requirements/{extra}.txt"
        assert one.specifier.contains(version, prereleases=True), f"{one}: the lock has {version}"


def test_a_gpus_lock_is_for_cuda_and_a_cpus_has_none_of_it() -> None:
    gpu, local = pins("gpu"), pins("local")
    assert {"vllm", "unsloth", "unsloth-zoo", "trl", "peft", "transformers", "torch"} <= gpu.keys()
    assert any(name.startswith("nvidia-cublas") for name in gpu)
    assert "+" not in "".join(gpu.values()), "a build of a local mirror"
    assert not [name for name in local if name.startswith(("nvidia-", "cuda-", "torch", "triton"))]

"""Where there is no GPU, torch is PyTorch's CPU build, or what is fetched instead is said first.

pip is the real one, isolated from this machine's settings. The indexes have packages of the right
names with nothing in them; a last test asks PyTorch's own index, where that answers.
"""

import functools
import http.server
import importlib.util
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import PAGES, REPO

_spec = importlib.util.spec_from_file_location("it", REPO / "requirements/install_torch.py")
assert _spec is not None and _spec.loader is not None
install_torch: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(install_torch)
RELEASE = install_torch.PIN.read_text().rsplit("torch==", 1)[1].strip()


def publish(folder: Path, name: str, version: str, *needs: str, size: int = 0) -> None:
    project = folder / name
    project.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(project / f"{stem}-py3-none-any.whl", "w") as file:
        info = f"{stem}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        file.writestr(
            f"{info}/METADATA", "\n".join([*lines, *map("Requires-Dist: {}".format, needs)])
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
        file.writestr(f"{name}.bin", os.urandom(size))
    links = "".join(f'<a href="{one.name}">{one.name}</a>' for one in project.glob("*.whl"))
    (project / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


@pytest.fixture
def pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with the CUDA build alone, pip's only one: no setting of this machine is read."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "pypi"
    publish(folder, "torch", RELEASE, "nvidia-cublas", size=2_000_000)
    publish(folder, "nvidia-cublas", "13.1", size=3_000_000)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", folder.as_uri())
    monkeypatch.setenv("PIP_IGNORE_INSTALLED", "1")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return folder


@pytest.fixture
def pytorch(tmp_path: Path) -> Iterator[str]:
    publish(tmp_path / "whl", "torch", f"{RELEASE}+cpu")
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    handler = functools.partial(quiet, directory=str(tmp_path / "whl"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def no_gpu(index: str) -> tuple[list[str], str]:
    return install_torch.plan(index, linux=True, gpu=lambda: False)


def resolved(arguments: list[str]) -> dict[str, str]:
    found = install_torch.resolve(arguments)
    assert found is not None
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in found}


def test_the_cpu_build_is_taken_where_pytorchs_index_answers(pypi: Path, pytorch: str) -> None:
    arguments, words = no_gpu(pytorch)
    assert "the CPU build" in words and pytorch in words
    assert resolved(arguments) == {"torch": f"{RELEASE}+cpu"}


def test_else_what_is_fetched_is_said_with_its_size(pypi: Path) -> None:
    arguments, words = no_gpu("http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer" in words
    assert f"torch {RELEASE} from its own indexes: 2 packages, 5 MB" in words
    assert "This is the CUDA build" in words and "PIP_FIND_LINKS=… make install" in words
    assert resolved(arguments) == {"torch": RELEASE, "nvidia-cublas": "13.1"}


def test_a_local_wheel_is_as_good(
    pypi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "links", "torch", f"{RELEASE}+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links" / "torch"))
    arguments, words = no_gpu("http://127.0.0.1:9")
    assert f"torch {RELEASE}+cpu" in words and "CUDA" not in words
    assert resolved(arguments) == {"torch": f"{RELEASE}+cpu"}


def test_a_gpu_or_another_system_takes_what_pip_has(pypi: Path, pytorch: str) -> None:
    for options in ({"linux": True, "gpu": lambda: True}, {"linux": False, "gpu": lambda: False}):
        arguments, _ = install_torch.plan(pytorch, **options)
        assert "--extra-index-url" not in arguments


def test_make_install_and_the_pages_take_it_so() -> None:
    makefile = (REPO / "Makefile").read_text()
    assert "python requirements/install_torch.py" in makefile
    line = f'pip install "torch=={RELEASE}" --index-url {install_torch.CPU_INDEX}'
    for page in PAGES:
        if 'pip install "langchain-art[local]"\n' not in (text := page.read_text()):
            continue
        before = text.partition('pip install "langchain-art[local]"')[0]
        assert line in before, f"{page}: torch comes first, from PyTorch's own index"
    assert line in (REPO / "README.md").read_text()


@pytest.mark.slow
def test_pytorchs_own_index_has_it(pypi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not install_torch.answers(install_torch.CPU_INDEX):
        pytest.skip(f"NOT CHECKED: {install_torch.CPU_INDEX} does not answer on this machine")
    monkeypatch.delenv("PIP_INDEX_URL")
    arguments, _ = no_gpu(install_torch.CPU_INDEX)
    found = resolved(arguments)
    assert found["torch"] == f"{RELEASE}+cpu"
    assert not [name for name in found if name.startswith(install_torch.CUDA)]

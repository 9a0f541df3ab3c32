"""The images, as far as they can be held without an engine that builds them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from langchain_art.wire.api_keys import new_api_key
from tests.support import forked_start
from tests.support.environments import UV, uv_environment
from tests.support.live_server import REPO, free_port, small_model

FILES = ["server/Dockerfile", "server/Dockerfile.cpu"]
KEY = new_api_key()


def instructions(file: str) -> list[tuple[str, str]]:
    text = "\n".join(line for line in (REPO / file).read_text().splitlines() if line[:1] != "#")
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def only(file: str, instruction: str) -> str:
    (found,) = [rest for word, rest in instructions(file) if word == instruction]
    return found


def argv(text: str) -> list[str]:
    return json.loads(text[text.index("[") :])


@pytest.mark.parametrize("file", FILES)
def test_it_is_pinned_and_runs_as_nobody_special(file: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, REPO / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    steps = instructions(file)
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", only(file, "FROM"))
    python = "3.11"  # what the lock files say that they are for
    assert only(file, "FROM").startswith(f"python:{python}.")
    commands = [one for _, rest in steps for one in rest.split("&&")]
    installs = [one.partition("pip install ")[2] for one in commands if "pip install " in one]
    for one in map(str.strip, installs):  # nothing that no lock names, no index beside another
        assert "--no-deps" in one and "--extra-index-url" not in one
        if lock := re.search(r"--require-hashes -r (\S+)", one):
            assert f"CPython {python}" in (REPO / lock[1]).read_text().splitlines()[0]
        else:
            assert one.endswith((" .", " -r requirements/torch-cpu.txt"))
    words = [word for word, _ in steps]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert only(file, "USER") not in ("root", "0")
    assert not [rest for word, rest in steps if word in ("ENV", "ARG") and "KEY" in rest]


def test_what_is_copied_is_there_and_makes_the_package(tmp_path: Path) -> None:
    listed = (REPO / ".dockerignore").read_text().splitlines()
    copied: list[set[tuple[str, str]]] = []
    for file in FILES:
        found = [rest.split() for word, rest in instructions(file) if word == "COPY"]
        copied.append({(source, target) for *sources, target in found for source in sources})
    for source, target in set.union(*copied):
        assert any(Path(source).match(line[1:]) for line in listed if line[:1] == "!"), source
        assert (REPO / source).exists()
        if (source, target) in set.intersection(*copied):
            there = tmp_path / target / (Path(source).name if target[-1] == "/" else "")
            there = tmp_path / source if target == "./" else there
            there.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (REPO / source).is_dir() else shutil.copyfile
            copy(REPO / source, there)
    done = subprocess.run(
        [UV, "build", "--wheel", "--python", sys.executable, tmp_path],
        env=uv_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((tmp_path / "dist").glob("langchain_art-*.whl"))


@pytest.mark.slow
def test_the_entry_point_serves_and_its_health_check_says_when(tmp_path: Path) -> None:
    port = str(free_port())
    place = {"python": sys.executable, "/data": str(tmp_path / "data"), "8000": port}
    [command, check, shown], other = (
        [argv(only(file, word)) for word in ("ENTRYPOINT", "HEALTHCHECK", "CMD")] for file in FILES
    )
    assert [command, check, shown] == other
    command, check = ([place.get(word, word) for word in words] for words in (command, check))
    check = [word.replace(":8000/", f":{port}/") for word in check]
    env = {k: v for k, v in os.environ.items() if k != "ART_API_KEY"} | {"HF_HUB_OFFLINE": "1"}

    def healthy() -> bool:
        return subprocess.run(check, capture_output=True).returncode == 0

    assert command[1] == "-m"
    program = (command[2], [*command[3:], str(small_model()), "--policy", "tiny"])
    log = tmp_path / "log"
    refused = forked_start.start(*program, env, tmp_path, log)
    assert refused.wait(60) == 1 and "ART_API_KEY" in log.read_text()
    assert shown == ["--help"]  # see cli/test_main
    server = forked_start.start(*program, env | {"ART_API_KEY": KEY}, tmp_path, log)
    try:
        assert not healthy()
        deadline = time.monotonic() + 120
        while not healthy() and server.poll() is None and time.monotonic() < deadline:
            time.sleep(1)  # a look is a process
        assert healthy()
        asked = httpx.get(f"http://127.0.0.1:{port}/v1/models")
        assert asked.status_code == 401
        models = httpx.get(asked.url, headers={"Authorization": f"Bearer {KEY}"}).json()
        assert "tiny" in {model["id"] for model in models["data"]}
        server.terminate()  # what `docker stop` sends
        assert server.wait(30) in (0, -signal.SIGTERM)  # in order, or by the signal at its end
    finally:
        server.kill()
        server.wait()

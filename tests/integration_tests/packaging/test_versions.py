"""LangChain's standard suites under the oldest and newest releases that `pyproject.toml` admits.

The environment of the other tests is the newest of everything, with openai 3. Here are the other
corners, each in an environment of its own; `make soak` runs the newest ones, and all of the suites.
"""

import os
import subprocess
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.environments import environment
from tests.support.live_server import REPO, RuleServer
from tests.support.soak import in_soak_alone, share

SUITES = (
    "tests/unit_tests/langchain_art/chat_models/test_standard.py",
    "tests/integration_tests/clients/test_standard.py",
)
#: What `make test` runs of them: each way of calling, tools and structured output.
PART = "init or bind or override or tool_calling or structured_output_async"
TOOLS = (
    "langchain-tests>=1.1,<2",
    "pytest>=8.3",
    "pytest-asyncio>=1",
    "pytest-timeout>=2.3",
    "hypothesis>=6.120",
)
#: In one process: pytest with its arguments, then the options of every command are read.
SUITES_AND_HELP = """
import sys, pytest
status = pytest.main(sys.argv[1:])
from langchain_art.cli.main import app
sys.exit(status or app(["--help"]))
"""
#: What the suites skip: inputs that a model of text does not read, and the unpickling of classes
#: that LangChain's own table does not list.
SKIPS = ("PDF", "audio", "image", "erializ", "syrupy", "own packages alone")


def floors() -> dict[str, str]:
    """package -> the oldest release that `pyproject.toml` admits."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    split = (line.split(">=", 1) for line in project["dependencies"])
    return {name: bounds.split(",")[0] for name, bounds in split}


def corners() -> dict[str, list[str]]:
    oldest = {name: floor for name, floor in floors().items() if name != "httpx"}  # the suites' own
    newest = ["langchain-core>=1.7", "langchain-openai>=1.7", "langgraph>=1.2.20"]
    return {
        "oldest": [f"{name}=={floor}" for name, floor in oldest.items()],
        "newest-openai-2": [*newest, "openai>=2.45,<3"],
        "newest-openai-3.0": [*newest, "openai==3.0.0"],
    }


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "corner", [one if one == "oldest" else in_soak_alone(one) for one in corners()]
)
def test_the_standard_suites_pass(corner: str, rule_server: RuleServer, tmp_path: Path) -> None:
    chosen = corners()[corner]
    named = {line.split("=")[0].split(">")[0] for line in chosen}
    others = [f"{name}>={oldest}" for name, oldest in floors().items() if name not in named]
    python = environment(corner, [*chosen, *others, *TOOLS])
    report = tmp_path / "report.xml"
    # In pytest's own folder it would remove what former runs of pytest have left there.
    options = [f"--junitxml={report}", f"--basetemp={tmp_path / 'inner'}"]
    options += ["-p", "no:langsmith_plugin"]  # as in `pyproject.toml`
    options += [] if share() else ["-k", PART]
    env = os.environ | {"ART_TEST_URL": rule_server.base_url, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [str(python), "-c", SUITES_AND_HELP, "-q", "-o", "addopts=", *options, *SUITES],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = ET.parse(report).getroot().iter("testcase")
    skipped = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    strange = [why for why in skipped if not any(word in why for word in SKIPS)]
    assert not strange
    wanted = "65 passed, 5 skipped, 1 xfailed" if share() else "23 passed"
    assert wanted in done.stdout and "serve" in done.stdout, done.stdout[-2000:]

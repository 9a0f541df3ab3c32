"""The canary on the real server: it passes a healthy one, and says what is wrong with others."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from langchain_art import ArtClient
from langchain_art.cli import main
from langchain_art.client.local_server import LocalServer
from langchain_art.diagnostics.canary import (
    ADVICE,
    LEAST_STEPS,
    LEAST_VARIANCE,
    POLICY,
    SIGMAS,
    CanaryReport,
    Token,
    change,
    run_canary,
    surprise,
)
from langchain_art.errors import ConfigError
from langchain_art.wire.api_keys import new_api_key
from langchain_art.wire.policies import FLOAT16_PRECISION, FULL_PRECISION, HALF_PRECISION
from tests.support import forked_start
from tests.support.live_server import REPO, FaultyServer, ForkedServer, small_model
from tests.support.soak import count, in_soak, share
from tests.support.stub_engines import StubServer

FLOAT16 = [in_soak, pytest.mark.soak("B3", 1, "canary of a server in float16")]
CHECKS = [
    "captured",
    "sampler = learner, first step",
    "sampler = learner, later steps",
    "drawn as reported",
    "adapter changes replies",
    "base stays as it was",
    "bare name serves the new version",
    "learns",
]


@pytest.fixture
def server(faulty_server: FaultyServer) -> Iterator[FaultyServer]:
    yield faulty_server
    faulty_server.fault("")


def failed(report: CanaryReport) -> dict[str, str]:
    assert report.passed == all(check.passed for check in report.checks)
    assert all(bool(check.advice) != check.passed for check in report.checks)
    return {check.name: check.measured for check in report.checks if not check.passed}


def test_a_healthy_server_passes_and_is_left_as_it_was(server: FaultyServer) -> None:
    heard: list[str] = []
    with ArtClient(server.base_url) as client:
        client.create_policy("somebody-elses")
        others = [one for one in client.policies() if one.name != POLICY]
        report = run_canary(client, group_size=8, on_progress=heard.append)
        assert [check.name for check in report.checks] == CHECKS
        assert failed(report) == {}, report
        assert [one for one in client.policies() if one.name != POLICY] == others
        assert client.policy(POLICY).version == 0
        assert [one.version for one in client.checkpoints(POLICY)] == [0]
        assert f"{POLICY}@0" in report.left
        client.status()  # the client that was given is not closed
        calls = [run.turns[0].call_id for run in client.trajectories(32)]
        assert len({client.call(one)["request"]["seed"] for one in calls if one}) == 32
    assert LEAST_STEPS + 3 <= len(heard) == len(set(heard)) <= 24 + 3
    figures = {check.name: check.value for check in report.checks}
    assert figures["captured"] == 32
    assert 0 < (figures["sampler = learner, later steps"] or 0) < 1e-5
    assert figures["base stays as it was"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=FLOAT16)])
def test_a_server_in_half_precision_passes_as_well(dtype: str, tmp_path: Path) -> None:
    """As on a GPU: LoRA is computed in 16 bits and learned in float32."""
    with ForkedServer(tmp_path / "data", "--dtype", dtype) as server:
        report = run_canary(server.base_url, group_size=8)
    assert failed(report) == {}, report
    assert report.dtype == dtype


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        # One of those that end a job; test_faults.py has them all.
        ("hot", "trains", "logprobs are those of temperature 1.3, while the calls say 1"),
        ("nan logprob", "captured|samples and records", ""),
        # "nats apart" if the step is refused; a smaller distance is seen by the canary itself.
        ("truncated", "trains|sampler = learner, later steps", "nats"),
        ("likeliest of four", "drawn as reported", "standard errors"),
        ("base drifts", "base stays as it was", ""),  # by nats, or to other tokens altogether
        ("learner unlearns", "learns", "standard errors"),
    ],
)
def test_a_broken_server_fails_and_the_check_says_why(
    server: FaultyServer, fault: str, check: str, words: str
) -> None:
    server.fault(fault)
    rate = 1e-2 if check == "learns" else 3e-2  # too high a one may end in short replies by chance
    size = 8 if check == "drawn as reported" else 4
    found = failed(run_canary(server.base_url, steps=4, group_size=size, learning_rate=rate))
    said = [found[name] for name in check.split("|") if name in found]
    assert said and words in said[0], found
    if "|" not in check and check != "trains":
        assert set(found) - {"learns"} == {check} - {"learns"}, found  # four steps may be too few


def test_a_call_that_is_refused_is_a_failed_check(tmp_path: Path) -> None:
    with StubServer(tmp_path / "data") as stub:  # its base model has another name than it says
        report = run_canary(stub.base_url, steps=4, group_size=2)
        with ArtClient(stub.base_url) as client:
            assert [one.version for one in client.checkpoints(POLICY)] == [0]
    assert "got model 'stub'" in failed(report)["prepares a policy"]
    assert len(report.checks) == 1


def test_the_command_prints_what_is_wrong(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_art.diagnostics.canary.PROMPTS", ["Say hello."])
    command = ["canary", "--base-url", server.base_url, "--steps", "4"]
    server.fault("shifted")
    bad = CliRunner().invoke(main.app, command, env={"COLUMNS": "200"})
    assert bad.exit_code == 1
    assert "do not train on this server yet" in bad.stdout
    assert "shifted by one" in " ".join(bad.stdout.split())
    assert ADVICE["error"] in bad.stdout
    both = CliRunner().invoke(main.app, [*command, "--model", "m"])
    assert isinstance(both.exception, ConfigError)
    with pytest.raises(ConfigError, match="steps=1"):
        run_canary(server.base_url, steps=1)


@pytest.mark.soak
@pytest.mark.slow
def test_the_command_starts_a_server_of_its_own_with_the_key_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In ``make test`` four steps of one prompt, of which all holds but perhaps that it learns."""
    env = {"ART_API_KEY": new_api_key()}
    command = ["canary", "--model", str(small_model()), "--json"]
    if not share():
        command += ["--steps", "4"]
        monkeypatch.setattr(LocalServer, "_spawn", forked_start.spawn)
        monkeypatch.setattr("langchain_art.diagnostics.canary.PROMPTS", ["Say hello."])
    done = CliRunner().invoke(main.app, command, env=env)
    report = json.loads(done.stdout)
    assert done.exit_code == (0 if report["passed"] else 1), done.output
    assert report["passed"] or not share(), report
    assert [check["name"] for check in report["checks"]] == CHECKS
    assert all(check["passed"] or check["name"] == "learns" for check in report["checks"]), report


def test_the_page_says_what_is_checked() -> None:
    page = (REPO / "docs" / "canary.md").read_text()
    for check in CHECKS:
        assert f"| `{check}` |" in page
    half = f"{HALF_PRECISION:g} in bfloat16, {FLOAT16_PRECISION:g} in float16"
    for bar in (f"within {SIGMAS:g}", half, f"`{POLICY}`"):
        assert bar in page
    assert f"{FULL_PRECISION:g}".replace("0.0001", "1e-4") in page


# --- the statistics -----------------------------------------------------------------------------


def drawn(count: int, temperature: float, cut: int, seed: int) -> list[Token]:
    """Tokens of random distributions over 30, drawn colder or cut off, and reported as plain."""
    rng = random.Random(seed)
    tokens: list[Token] = []
    for _ in range(count):
        logits = [rng.gauss(0, 2) for _ in range(30)]
        total = math.log(sum(map(math.exp, logits)))
        plain = sorted((x - total for x in logits), reverse=True)
        weights = [math.exp(p / temperature) if i < cut else 0.0 for i, p in enumerate(plain)]
        [index] = rng.choices(range(30), weights)
        top = tuple((str(i), p) for i, p in enumerate(plain[:20]))
        tokens.append(Token(str(index), plain[index], top))
    return tokens


@pytest.mark.soak
def test_the_surprise_is_a_standard_normal_where_all_is_well() -> None:
    found = [surprise(drawn(300, 1.0, 30, seed))[0] for seed in range(count(50, 200))]
    mean = sum(found) / len(found)
    variance = sum((z - mean) ** 2 for z in found) / len(found)
    assert abs(mean) < 0.25 and 0.7 < variance < 1.35
    assert max(map(abs, found)) < SIGMAS


@pytest.mark.parametrize(("temperature", "cut"), [(0.7, 30), (1.0, 5), (1.4, 30)])
def test_the_surprise_tells_what_was_drawn_otherwise(temperature: float, cut: int) -> None:
    sigmas, variance = surprise(drawn(1000, temperature, cut, 0))
    assert variance > LEAST_VARIANCE
    assert (sigmas > SIGMAS) if temperature <= 1 else (sigmas < -SIGMAS)


def test_texts_that_several_tokens_have_are_not_compared() -> None:
    one = Token("a", -0.5, (("a", -0.5), ("�", -1.0), ("�", -2.0)))
    other = Token("a", -0.6, (("a", -0.6), ("�", -3.0), ("�", -4.0)))
    assert change([one], [other]) == pytest.approx(0.1)
    assert change([one], [one]) == 0.0
    parted = Token("b", -0.5, one.top)
    assert change([one, one], [parted, other]) == 0.0  # what comes after is no longer comparable

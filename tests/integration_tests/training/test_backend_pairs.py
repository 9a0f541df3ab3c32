"""Each sampler with each learner, behind the whole real server: one story for every pair.

One small model fits all of them: the e-mail example's, with heads wide enough for vLLM. All of it
is float32 on a CPU, so that what one engine says of a token the other must say too, and so must
plain transformers with PEFT from the adapter's downloaded files.

``-o log_cli=true`` shows each pair's distances.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from langchain_core.utils.function_calling import convert_to_openai_tool
from openai.types.chat import ChatCompletionMessage

from examples.email_search.agent import SYSTEM_PROMPT, TOOLS
from langchain_art import ArtClient, TrainConfig
from langchain_art.errors import InvalidRequest, NotFound
from langchain_art.wire import TrainResult
from langchain_art_server.backends.base import ChatReply
from tests.support.engines import engines, part_of
from tests.support.environments import unsloth_python
from tests.support.live_server import ForkedServer
from tests.support.soak import count, in_soak, share
from tests.support.steps_of_a_fit import ok
from tests.support.tiny_models import WEATHER, load_plain, teacher_logprobs, with_adapter
from tests.support.vllm_engine import children, command, gone, vllm_table, wide_model

log = logging.getLogger(__name__)

#: Mean distance per token of two engines' logprobs, in nats, and what shows another version.
EXACT, OTHER = 1e-4, 1e-2
RUNS = count(2, 4)
STEP = TrainConfig(learning_rate=1e-2)
QUESTION: Any = {"role": "user", "content": 'When is "Falcon audit"?'}
AGENT: Any = [{"role": "system", "content": SYSTEM_PROMPT}, QUESTION]
EMAIL_TOOLS: Any = [convert_to_openai_tool(tool) for tool in TOOLS]
FORCED: Any = {"type": "function", "function": {"name": "weather"}}
#: A setting that is wrong for a pair, and what is said of it.
BROKEN: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("embedded", "peft"): ({"learner": {"python": "/nowhere/python"}}, "/nowhere/python"),
    ("embedded", "ranks"): ({"learner": {"optimizer": "sgd"}}, "should be 'adamw' or 'adamw_8bit'"),
    ("embedded", "unsloth"): ({"learner": {"python": sys.executable}}, "No module named 'unsloth'"),
    ("vllm", "peft"): ({"sampler": {"args": ["--host=0.0.0.0"]}}, "got ['--host']"),
    ("vllm", "ranks"): ({"sampler": {"kind": "transformers"}}, "expected it with kind='vllm'"),
    ("vllm", "unsloth"): ({"learner": {"ranks": 2}}, "expected it with kind='peft'"),
}


def learner_table(learner: str) -> dict[str, Any]:
    if learner == "unsloth":
        python = unsloth_python()
        return {"threads": 1, "kind": "unsloth", "python": str(python)}
    return {"threads": 1, "ranks": 2 if learner == "ranks" else 1}


class Pair(ForkedServer):
    """The server with one sampler and one learner; `changes` go over its settings.

    vLLM takes turns with the learner: it sleeps while a step is trained.
    """

    def __init__(
        self, folder: Path, model: Path, names: tuple[str, str], changes: dict[str, Any]
    ) -> None:
        self.sampler, self.learner = names
        tables = {"learner": learner_table(self.learner)}
        tables["sampler"] = vllm_table() if self.sampler == "vllm" else {"threads": 1}
        lines = ['device = "cpu"', f"take_turns = {json.dumps(self.sampler == 'vllm')}"]
        for name in tables | changes:
            lines.append(f"[{name}]")
            table = tables.get(name, {}) | changes.get(name, {})
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        super().__init__(folder / "data", settings="\n".join([*lines, ""]), model=model)
        self.model = model

    def learning(self) -> int:
        """Process id of the learner."""
        [found] = [pid for pid in engines(self) if part_of(pid) == "learner"]
        return found


def pairs(*, start: bool) -> Iterator[Any]:
    """All of them; of those that `start`, three are for ``make soak``.

    Each sampler and each learner is in one of the others.
    """
    for sampler, learner in BROKEN:
        marks = [pytest.mark.slow, pytest.mark.timeout(900)]
        name = f"{sampler}-{learner}"
        if sampler == "vllm":
            marks += [pytest.mark.vllm, pytest.mark.xdist_group(name)]
        if start and name in ("vllm-ranks", "vllm-peft", "embedded-unsloth"):
            marks += [in_soak, pytest.mark.soak("V3", 1, f"{sampler} with the learner {learner}")]
        yield pytest.param((sampler, learner), id=name, marks=marks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(tmp_path_factory.mktemp("pairs") / "model")


@pytest.fixture(scope="module", params=list(pairs(start=True)))
def pair(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"), model, request.param, {})
    made.start(timeout=600)
    yield made
    assert made.process is not None
    family = [*children(made.process.pid), *engines(made)]
    made.stop()
    assert gone(family)


@pytest.fixture
def client(pair: Pair) -> Iterator[ArtClient]:
    with ArtClient(pair.base_url) as made:
        yield made


def run_once(pair: Pair, policy: str, run: str, seed: int) -> list[str]:
    """What an agent of any make does, tagged with its run. Returns the ids of its calls."""
    sdk = openai.OpenAI(base_url=pair.base_url, api_key="none", max_retries=0)

    def say(node: str, messages: list[Any], **more: Any) -> Any:
        options: dict[str, Any] = {"model": policy, "seed": seed, "max_tokens": 32} | more
        art = {"trajectory_id": run, "node": node}
        return sdk.chat.completions.create(messages=messages, extra_body={"art": art}, **options)

    whole = say("whole", [QUESTION])
    tool = say("tool", AGENT, tools=EMAIL_TOOLS)
    calls = tool.choices[0].message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": one.id, "content": "No mail."} for one in calls]
    history = [*AGENT, tool.choices[0].message.model_dump(exclude_none=True), *results]
    after = say("after", history if results else [*history, QUESTION], tools=EMAIL_TOOLS)
    forced = say("forced", AGENT, tools=[WEATHER], tool_choice=FORCED, max_tokens=200)
    check_forced(forced.choices[0].message)
    chunks = list(say("stream", [QUESTION], stream=True))
    said = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(said) == (whole.choices[0].message.content or "")  # of one seed
    answered = [whole, tool, after, forced, chunks[0]]
    assert len({one.model for one in answered}) == 1
    return [one.id for one in answered]


def check_forced(message: ChatCompletionMessage) -> None:
    [call] = message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    said = json.loads(call.function.arguments)
    assert len(said["city"]) <= 6 and 1 <= said["days"] <= 9


def runs_of(
    pair: Pair, client: ArtClient, policy: str, runs: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """Runs of the policy at once, rewarded; their ids, and what is recorded of their calls."""
    version = client.policy(policy).version
    ids = [f"{policy}-{version}-{seed}" for seed in range(runs)]
    with ThreadPoolExecutor(runs) as pool:
        called = list(pool.map(partial(run_once, pair, policy), ids, range(runs)))
    records = [[client.call(one) for one in calls] for calls in called]
    for seed, (_, tool, after, _, _) in enumerate(records):
        client.reward(ids[seed], float(seed % 2))
        shown = tool["prompt_token_ids"] + tool["token_ids"]
        assert after["prompt_token_ids"][: len(shown)] == shown  # nothing was tokenised again
    flat = [record for run in records for record in run]
    assert {record["model"] for record in flat} == {f"{policy}@{version}"}
    return ids, flat


def trained(pair: Pair, client: ArtClient, policy: str) -> tuple[TrainResult, list[dict[str, Any]]]:
    """A step on new runs."""
    ids, records = runs_of(pair, client, policy, RUNS)
    result = client.wait(client.train([ids], policy, STEP))
    metrics = result.metrics
    assert metrics["calls_trained"] == 5 * RUNS
    assert not result.excluded
    assert metrics["logprob_gap_mean"] <= EXACT
    assert metrics["probe_change"] > 0
    assert client.policy(policy).version == result.version
    return result, records


def asked(pair: Pair, client: ArtClient, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What each of them says to some seeds, all at once: in one batch, where there are batches."""
    calls = [(name, seed) for name in names for seed in range(4)]
    with pair.http() as http, ThreadPoolExecutor(len(calls)) as pool:
        ids = list(pool.map(partial(ask, http), *zip(*calls, strict=True)))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for (name, _), call in zip(calls, ids, strict=True):
        found[name].append(client.call(call))
    return found


def ask(http: httpx.Client, name: str, seed: int) -> str:
    body = {"model": name, "messages": [QUESTION], "seed": seed, "max_tokens": 24}
    return ok(http.post("/v1/chat/completions", json=body | {"temperature": 0.8}))["id"]


def distance(plain: Any, records: list[dict[str, Any]]) -> float:
    """Mean distance of the recorded logprobs from a plain forward pass, in nats a token."""
    apart: list[torch.Tensor] = []
    for one in records:
        numbers = one["prompt_token_ids"], one["token_ids"], one["logprobs"]
        again = teacher_logprobs(plain, ChatReply(*numbers, None, [], "stop"), one["temperature"])
        apart.append((torch.tensor(one["logprobs"]) - again).abs())
    return torch.cat(apart).mean().item()


@pytest.mark.soak
def test_two_steps_in_a_row_are_served_exactly(
    pair: Pair, client: ArtClient, tmp_path: Path
) -> None:
    """In ``make test`` ranks take one step; PEFT takes both, and goes back to the first."""
    client.create_policy("agent")
    base = load_plain(pair.model)
    plain = {pair.base_name: base, "agent@0": base}
    twice = share() or pair.sampler == "vllm" or pair.learner == "peft"
    alone: list[list[dict[str, Any]]] = []
    for step in (1, 2) if twice else (1,):
        result, records = trained(pair, client, "agent")
        assert result.version == step
        free = [record for record in records if not record["restricted"]]
        assert len(free) == 4 * RUNS
        assert any(record["reply"].get("tool_calls") for record in free) or step == 2
        assert distance(plain[f"agent@{step - 1}"], free) <= EXACT
        folder = client.download_adapter("agent", step, tmp_path / str(step))
        plain[f"agent@{step}"] = with_adapter(pair.model, folder)
        alone += asked(pair, client, ["agent"]).values()
        said = asked(pair, client, ["agent", *plain])
        assert {record["model"] for record in said["agent"]} == {f"agent@{step}"}
        gaps = {name: distance(plain[name], said[name]) for name in plain}
        assert max(gaps.values()) <= EXACT, gaps
        assert distance(plain[f"agent@{step}"], said["agent"]) <= EXACT
        assert distance(plain[f"agent@{step - 1}"], said["agent"]) >= OTHER
        log.warning(
            "%s, %s: step %d, gap %.1e, new version %.1e, probe %.2g, learner %.2f s",
            *(pair.sampler, pair.learner, step, result.metrics["logprob_gap_mean"]),
            *(gaps[f"agent@{step}"], result.metrics["probe_change"], result.metrics["seconds"]),
        )
    if twice:
        a_former_version_serves_again_and_one_is_deleted(pair, client, tmp_path, *alone)


def a_former_version_serves_again_and_one_is_deleted(
    pair: Pair,
    client: ArtClient,
    tmp_path: Path,
    before: list[dict[str, Any]],
    between: list[dict[str, Any]],
) -> None:
    assert [one["logprobs"] for one in between] != [one["logprobs"] for one in before]
    assert client.rollback("agent", 1).version == 1
    again = asked(pair, client, ["agent"])["agent"]
    for one, other in zip(before, again, strict=True):
        assert other["model"] == "agent@1"
        assert other["token_ids"] == one["token_ids"]
        assert other["logprobs"] == pytest.approx(one["logprobs"], abs=EXACT)
    with pytest.raises(InvalidRequest, match="roll back first"):
        client.delete_checkpoint("agent", 1)
    client.delete_checkpoint("agent", 2)
    with pytest.raises(NotFound):
        client.download_adapter("agent", 2, tmp_path / "gone")
    assert [one.version for one in client.checkpoints("agent")] == [0, 1]


@pytest.mark.soak
def test_the_learner_is_killed_in_a_step_which_is_begun_again(
    pair: Pair, client: ArtClient, tmp_path: Path
) -> None:
    """``make test`` kills PEFT's of the embedded pairs; test_learner_ranks.py kills ranks."""
    if not share() and pair.sampler != "vllm" and pair.learner != "peft":
        pytest.skip("in make soak")
    client.create_policy("killed")
    ids, _ = runs_of(pair, client, "killed", 2)
    restarts, victim = client.status().engine_restarts, pair.learning()
    family = [victim, *children(victim)]
    assert len(family) >= (2 if pair.learner == "ranks" else 1)
    # It is stopped before the step reaches it, which would end before the test has looked.
    os.kill(victim, signal.SIGSTOP)
    job = client.train([ids], "killed", STEP)
    with pair.http() as http:
        heard: list[dict[str, Any]] = []
        while not any(event["message"].startswith("training ") for event in heard):
            where = {"wait": 5, "after": heard[-1]["seq"] if heard else 0}
            heard += http.get(f"/v1/jobs/{job.id}/events", params=where).json()["data"]
    time.sleep(1)  # the step is sent right after it is said
    os.kill(victim, signal.SIGKILL)
    result = client.wait(job)
    assert gone(family)
    assert "The learner died in step 1, which starts again." in pair.log.read_text()
    assert client.status().engine_restarts == restarts + 1
    assert (result.version, client.policy("killed").version) == (1, 1)
    assert [one.version for one in client.checkpoints("killed")] == [0, 1]
    folder = client.download_adapter("killed", 1, tmp_path / "1")
    said = asked(pair, client, ["killed"])["killed"]
    assert distance(with_adapter(pair.model, folder), said) <= EXACT


@pytest.mark.parametrize("names", list(pairs(start=False)))
def test_a_setting_that_is_wrong_for_the_pair_is_refused_in_words(
    names: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    changes, said = BROKEN[names]
    mine = tmp_path / "model"  # in the command lines of all engines
    mine.symlink_to(model)
    assert said in Pair(tmp_path, mine, names, changes).refusal()
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    assert gone([pid for pid in pids if str(mine) in str(command(pid))])

"""The environments of docs/environments.md: a real fit on each, with the environment's reward."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import textarena

from langchain_art import ArtClient, Trajectory
from tests.integration_tests.environments.test_training_traces import (
    OPENENV,
    check_import,
    exported,
)
from tests.support.environment_fit import fits
from tests.support.environment_libraries import APART, told
from tests.support.live_server import REPO, LiveServer, free_port
from tests.support.pages import blocks
from tests.support.soak import count
from tests.support.steps_of_a_fit import new_id

PAGE = blocks(REPO / "docs/environments.md")
SHARED, *OWN = [one.code for one in PAGE if one.language == "python"]
NAMES = ["reasoning-gym", "textarena", "openenv", "verifiers"]
CODE = dict(zip(NAMES, OWN[:-2], strict=True))
STEPS, SIZE, GROUPS = count(1, 10), count(4, 8), count(2, 4)


def score(name: str, run: Trajectory) -> float:
    """What the environment gives for a run's replies, without the adapter."""
    replies = [str((turn.reply or {})["content"]) for turn in run.turns]
    scenario = str(run.scenario)
    if name == "reasoning-gym":
        data = reasoning_gym.create_dataset("letter_counting", seed=0, size=300, max_words=6)
        return data.score_answer(replies[0], data[int(scenario.rpartition("-")[2])])
    if name == "textarena":
        game = textarena.make("GuessTheNumber-v0-raw")
        game.reset(num_players=1, seed=int(scenario.rpartition("-")[2]))
        ends = [game.step(f"[{reply}]")[0] for reply in replies]
        assert ends == [False] * (len(ends) - 1) + [True]
        return game.close()[0][0]
    if name == "openenv":
        number = random.Random(json.loads(scenario)["seed"]).randrange(6)
        return (int(replies[-1]) == number) / len(replies)
    word = str(run.turns[0].messages[-1]["content"]).split()[-1].strip("?")
    return float(replies[0] == str(word.count("e")))


#: Run in the process of a library's fit, before it: refused actions and tasks, a graph that fails;
#: training traces.
BESIDE = {
    "openenv": f"""
import asyncio
from langchain_core.messages import AIMessage
leaves = StateGraph(MessagesState).add_node("say", lambda _: {{"messages": [AIMessage("left")]}})
leaves = leaves.add_edge(START, "say").compile()
left = from_openenv("http://127.0.0.1:8765", leaves, resets=[{{"seed": 0}}], held_out=0)
run = asyncio.run(left.rollout(left.train[0]))
beside = [run.reward, run.scores]
{OPENENV}""",
    "verifiers": """
import asyncio
class Greet(vf.Task[vf.TaskData]): ...
class Stopped(Greet):
    @vf.stop
    async def at_once(self, trace: vf.Trace) -> bool:
        return True
class Endless(vf.Taskset[Greet]):
    INFINITE, kind = True, Greet
    def load(self):
        yield self.kind(vf.TaskData(prompt="Hello", system_prompt="Be brief."), self.config.task)
class Stopping(Endless):
    kind = Stopped
async def fail(state: MessagesState):
    raise KeyError(*[message.text for message in state["messages"]])
fails = StateGraph(MessagesState).add_node(fail).add_edge(START, "fail").compile()
def error_of(tasks):
    try:
        wrong = from_verifiers(tasks, fails, held_out=0)
        return asyncio.run(wrong.rollout(wrong.train[0]))
    except Exception as error:
        return f"{type(error).__name__} {error}"
config = vf.TasksetConfig()
tasks = Endless(config), Stopping(config).take(1), Endless(config).take(1)
beside = [error_of(one) for one in tasks]
""",
}


def check_beside(name: str, found: Any) -> None:
    if name == "openenv":  # an action that it refuses ends the run
        assert found[:2] == [0.0, {"refused_action": 1.0}]
    else:
        endless, stopped, failed = found
        assert endless == (
            "ConfigError got a taskset without an end, expected a finite one; use .take(n)"
        )
        assert stopped.startswith("ConfigError got the task Stopped with @stop or @intercept")
        assert failed.splitlines()[0] == "KeyError ('Be brief.', 'Hello')"  # the graph's own


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_a_fit_learns_from_the_environments_reward(
    name: str,
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ART_BASE_URL", server.base_url)
    code = f"{SHARED}\n{CODE[name]}{BESIDE.get(name, '')}"
    policy, sizes, traces = new_id(name), (STEPS, SIZE, GROUPS), tmp_path / "runs.jsonl"
    exported_run = exported(server, traces) if name == "openenv" else ""
    if name == "openenv":
        port = free_port()
        serve = f"from tests.support.openenv_server import serve\nserve({port})\n"
        code = code.replace(":8765", f":{port}/", 1).replace(":8765", f":{port}")
        code = serve + code
    if name in APART:
        argv = ("-m", "tests.support.environment_fit", server.base_url, *map(str, sizes))
        [found] = json.loads(told(name, tmp_path, *argv, code=json.dumps({policy: code}))).values()
        check_beside(name, found["beside"])
        if name == "openenv":
            check_import(exported_run, traces, found["beside"][2], capsys)
    else:
        monkeypatch.chdir(tmp_path)
        [found] = fits({policy: code}, server.base_url, *sizes).values()
    assert found["parts"] == ([6, 2] if name == "verifiers" else [250, 50])
    trained = [step for step in found["steps"] if step["deviation"] > 0]
    assert len(found["steps"]) == STEPS and trained[0]["version"] == 1
    assert all(step["calls_trained"] > 0 for step in trained)
    with ArtClient(server.base_url) as client:
        runs = [
            client.trajectory(run.id)
            for run in client.trajectories(2000)
            if (run.turns[0].model or "").startswith(f"{policy}@")
        ]
    groups = [step["groups"] for step in found["steps"]]
    assert len(runs) == SIZE * sum(groups) + 2 and min(groups) >= GROUPS
    for run in runs:
        assert run.reward == pytest.approx(score(name, run)), run
        assert [turn.extends for turn in run.turns] == [None, *range(len(run.turns) - 1)]

"""Harbor's trials on docs/environments.md: of a graph here, of Harbor's own agent, by its command.

Harbor is unmodified; its runtime is `tests.support.harbor_local`, without containers.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from langchain_art import ArtClient
from tests.support.environment_fit import SHAPE
from tests.support.environment_libraries import python_of, told
from tests.support.environments import interpreter
from tests.support.judges.judge_server import JudgeServer, check_by_name
from tests.support.live_server import REPO, LiveServer
from tests.support.pages import blocks
from tests.support.soak import count, in_soak
from tests.support.steps_of_a_fit import new_id

try:
    interpreter("3.12")
except FileNotFoundError as error:
    pytest.skip(f"Harbor needs Python 3.12: {error}", allow_module_level=True)

SHARED, *_, GRAPH, AGENT = [
    one.code for one in blocks(REPO / "docs/environments.md") if one.language == "python"
]
WORDS = ("tree", "bee", "letter", "eleven", "moon", "sky", "sea", "cheese")
RUNTIME = "tests.support.harbor_local:LocalEnvironment"
#: A project for Harbor's `langgraph` agent, which says who makes the graph, and with which model.
PROJECT = {
    "agent/langgraph.json": json.dumps({"dependencies": [], "graphs": {"a": "./graph.py:make"}}),
    "agent/graph.py": f"""
import json, os
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
def make(config):
    given = json.loads(os.environ["HARBOR_MODEL_KWARGS_JSON"])
    name = os.environ["HARBOR_MODEL"].partition(":")[2]
    shape = {{"response_format": {SHAPE}}}
    model = ChatOpenAI(model=name, max_tokens=8, model_kwargs=shape, **given)
    def work(state: MessagesState):
        said = model.invoke(state["messages"])
        with open("/app/answer.txt", "w") as file:
            file.write(said.text)
        return {{"messages": [said]}}
    return StateGraph(MessagesState).add_node(work).add_edge(START, "work").compile()
""",
}


def reward_of(reply: object, right: int) -> float:
    """What the tasks' verifier gives: the nearer, the more."""
    return (9 - abs(int(str(reply)) - right)) / 10


def write_tasks(folder: Path) -> None:
    """Tasks of Harbor: how often is e in a word?"""
    for word in WORDS:
        right = word.count("e")
        test = f"""off=$(($(cat /app/answer.txt) - {right}))
echo 0.$((9 - ${{off#-}})) > /logs/verifier/reward.txt"""
        files = {
            "task.toml": 'schema_version = "1.4"\n',
            "instruction.md": f"Write into /app/answer.txt how often e is in {word}.\n",
            "environment/Dockerfile": "FROM debian\n",
            "tests/test.sh": f"#!/bin/bash\n{test}\n",
        }
        for name, text in files.items():
            path = folder / "tasks" / word / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


#: Run in the process of the graph's fit, before it, on the tasks of `failing`.
FAILING = """
from langchain_core.messages import AIMessage
def fail(state: MessagesState):
    if "moon" in state["messages"][0].text:
        raise KeyError("mine")
    return {"messages": [AIMessage("done")]}
failing = StateGraph(MessagesState).add_node(fail).add_edge(START, "fail").compile()
without = asyncio.run(harbor.DatasetConfig(path="failing").get_task_configs())
wrong = from_harbor(without, failing, held_out=0, trial=sandbox)
beside = {}
for scenario in wrong.train:
    try:
        asyncio.run(wrong.rollout(scenario))
    except Exception as error:
        beside[scenario["id"]] = f"{type(error).__name__} {error}"
"""
#: Run after the agent's code. Each of its runs is a process that imports LangChain: in `make test`
#: it is evaluated with one (`test_remote_graph` has fits whose calls come from elsewhere). Before
#: it, a judge is asked by a name through litellm, which Harbor has imported.
FEWER = f"""
from tests.support.judges.litellm_judge import judged
as_it_is, beside = train, asyncio.run(judged("JUDGE"))
def train(env, steps):
    return as_it_is(env, {count(0, 10)})
"""


def write_failing(folder: Path) -> None:
    """Tasks without a reward, with several rewards, and one on which the graph fails."""
    for word, test in (
        ("sky", "true\n"),
        ("sea", 'echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json\n'),
        ("moon", None),
        ("tree", None),
    ):
        shutil.copytree(folder / "tasks" / word, folder / "failing" / word)
        if test is not None:
            (folder / "failing" / word / "tests/test.sh").write_text(test)


@pytest.mark.slow
@pytest.mark.soak
def test_fits_learn_from_the_verifiers_reward(server: LiveServer, tmp_path: Path) -> None:
    """One of a graph here, then one of Harbor's agent: both import Harbor once."""
    write_tasks(tmp_path)
    write_failing(tmp_path)
    policies = graph, agent = new_id("graph"), new_id("agent")
    steps, size, groups = count(1, 10), count(2, 4), count(1, 2)
    codes = f"{SHARED}\n{GRAPH}\n{FAILING}", f"{AGENT}\n{FEWER}"
    local = '"project_path": "agent", "skip_install": True'
    codes = [
        code.replace('"type": "docker"', f'"import_path": "{RUNTIME}"').replace(
            '"project_path": "agent"', local
        )
        for code in codes
    ]
    argv = ("-m", "tests.support.environment_fit", server.base_url)
    argv += (str(steps), str(size), str(groups))
    with JudgeServer() as judge:
        codes = json.dumps(dict(zip(policies, codes, strict=True))).replace("JUDGE", judge.base_url)
        fits = json.loads(told("harbor", tmp_path, *argv, code=codes))
    check_by_name(fits[agent]["beside"], judge)
    said = fits[graph]["beside"]
    assert said.keys() == {"moon", "sky", "sea"}
    assert said["moon"].partition(chr(10))[0] == "KeyError 'mine'"
    assert "gave no reward: ['RewardFileNotFoundError" in said["sky"]
    assert said["sea"].startswith("ArtError got the rewards {'a': 1, 'b': 0}")
    with ArtClient(server.base_url) as client:
        ids = client.trajectories(2000)
        all_runs = [run for run in map(client.trajectory, (one.id for one in ids)) if run.turns]
    for policy, done, node in ((graph, steps, "work"), (agent, count(0, 10), None)):
        found = fits[policy]
        assert found["parts"] == [6, 2]
        assert [step["version"] for step in found["steps"]] == list(range(1, done + 1))
        for step in found["steps"]:
            flat = step["excluded"].get("groups.zero_variance", 0)
            assert step["calls_trained"] == size * (step["groups"] - flat) > 0
            assert step["groups"] >= groups
        runs = [run for run in all_runs if (run.turns[0].model or "").startswith(f"{policy}@")]
        evaluated = 2 if done else 1  # before and after
        assert len(runs) == size * sum(step["groups"] for step in found["steps"]) + evaluated
        for run in runs:
            [turn] = run.turns
            right = str(run.scenario).count("e")
            wanted = reward_of((turn.reply or {})["content"], right)
            assert (run.reward, turn.node) == (wanted, node)


@in_soak  # Harbor's agent above, and runs in the URL (`test_other_formats`) show it
@pytest.mark.slow
@pytest.mark.soak
def test_the_server_is_the_model_of_harbor_run(server: LiveServer, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    policy, run = new_id("harbor"), new_id("run")
    argv = [str(python_of("harbor").parent / "harbor"), "run", "--path", "tasks/bee"]
    argv += ["--agent", "langgraph", "--agent-kwarg", "project_path=agent"]
    argv += ["--agent-kwarg", "skip_install=true", "--env", RUNTIME]
    argv += ["--model", f"openai/{policy}", "--base-url", f"{server.base_url}/runs/{run}"]
    with ArtClient(server.base_url) as client:
        client.create_policy(policy)
        env = os.environ | {"PYTHONPATH": str(REPO), "OPENAI_API_KEY": "none"}
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        [result] = [json.loads(one.read_text()) for one in tmp_path.glob("jobs/*/*/result.json")]
        rewards = result["verifier_result"]["rewards"]
        [turn] = client.reward(run, rewards["reward"]).turns
    assert rewards["reward"] == reward_of((turn.reply or {})["content"], 2)

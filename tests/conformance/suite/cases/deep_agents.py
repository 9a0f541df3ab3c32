"""LangChain's deep agents: plans, files, and sub-agents that are asked by a tool."""

from __future__ import annotations

from langgraph.checkpoint.memory import InMemorySaver

from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes, topology
from tests.conformance.suite.scripts import script
from tests.conformance.suite.tools import LOOK, look

_PLAN = {"call": "write_todos", "args": {"todos": [{"content": "look", "status": "pending"}]}}
_WRITE = {"call": "write_file", "args": {"file_path": "/note.txt", "content": "a door"}}
_READ = {"call": "read_file", "args": {"file_path": "/note.txt"}}


@in_two_modes(
    "a deep agent that plans and writes files",
    Expect("model", "write_todos", step=2),
    Expect("model", "write_file", step=4),
    Expect("model", "read_file", step=6),
    Expect("model", "a door", step=8),
    remark="deepagents",
)
def planning(kit: Kit) -> Program:
    from deepagents import create_deep_agent

    agent = create_deep_agent(kit.model, [look])
    yield kit.run(agent, kit.ask(_PLAN, _WRITE, _READ, "a door"))


@topology(
    "a deep agent with sub-agents",
    Expect("model", "task", step=2),
    Expect("tools/model", "look", step=2),
    Expect("tools/model", "a door", step=4),
    Expect("model", "it is a door", step=4),
    remark="deepagents: the sub-agent answers to the tool's text",
)
def delegating(kit: Kit) -> Program:
    from deepagents import create_deep_agent

    scout = {
        "name": "scout",
        "description": "Looks at things.",
        "system_prompt": "Look around.",
        "tools": [look],
    }
    agent = create_deep_agent(kit.model, [], subagents=[scout])
    asked = script(LOOK, "a door", intro=f"Run {kit.number}.")
    task = {"call": "task", "args": {"description": asked, "subagent_type": "scout"}}
    yield kit.run(agent, kit.ask(task, "it is a door"))


@in_two_modes(
    "a deep agent that asks two sub-agents at once, on a thread",
    Expect("model", "task, task", step=2),
    Expect("tools/model", "left", step=2),
    Expect("tools/model", "right", step=2),
    Expect("model", "both", step=4),
    Expect("model", "again", step=9),
    ordered=False,
    threaded=True,
    remark="deepagents, with a checkpointer; the second turn of the thread continues the run",
)
def beside(kit: Kit) -> Program:
    from deepagents import create_deep_agent

    agent = create_deep_agent(kit.model, [], checkpointer=InMemorySaver())
    tasks = [
        {
            "call": "task",
            "args": {"description": kit.says(word), "subagent_type": "general-purpose"},
        }
        for word in ("left", "right")
    ]
    yield kit.run(agent, kit.ask({"calls": tasks}, "both"))
    yield kit.run(agent, kit.ask("again"))

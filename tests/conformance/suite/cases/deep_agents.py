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
    *Expect.turns("model", "write_todos", "write_file", "read_file", "a door", first=2),
    remark="deepagents",
)
def planning(kit: Kit) -> Program:
    from deepagents import create_deep_agent

    agent = create_deep_agent(kit.model, [look])
    yield kit.run(agent, kit.ask(_PLAN, _WRITE, _READ, "a door"))


@topology(
    "a deep agent with sub-agents",
    Expect("model", "task", step=2),
    *Expect.turns("tools/model", "look", "a door", first=2),
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
    *Expect.turns("tools/model", "left", "right", first=2, apart=0),
    *Expect.turns("model", "both", "again", first=4, apart=5),
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

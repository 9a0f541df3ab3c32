"""LangChain's own middleware that limits, plans, searches or runs commands; hooks that jump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import (
    FilesystemFileSearchMiddleware,
    ModelCallLimitMiddleware,
    PIIDetectionError,
    PIIMiddleware,
    ShellToolMiddleware,
    TodoListMiddleware,
    ToolCallLimitMiddleware,
    ToolErrorMiddleware,
    after_agent,
    after_model,
    before_agent,
    before_model,
    wrap_model_call,
    wrap_tool_call,
)
from langchain_core.messages import HumanMessage, ToolMessage

from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes, topology
from tests.conformance.suite.nodes import talk
from tests.conformance.suite.tools import LOOK, WEIGH, drop, look, run_agent, weigh


@in_two_modes(
    "a list of things to do",
    *Expect.turns("model", "write_todos", "all done", apart=3),
    remark="TodoListMiddleware",
)
def todo_list(kit: Kit) -> Program:
    agent = create_agent(kit.model, [], middleware=[TodoListMiddleware()])
    todos = [{"content": "look", "status": "completed"}]
    yield kit.run(agent, kit.ask({"call": "write_todos", "args": {"todos": todos}}, "all done"))


@in_two_modes(
    "a limit of model calls",
    *Expect.turns("model", "look", "weigh", first=2, apart=4),
    remark="ModelCallLimitMiddleware ends the agent in the model's place",
)
def model_call_limit(kit: Kit) -> Program:
    limit = ModelCallLimitMiddleware(run_limit=2, exit_behavior="end")
    yield run_agent(kit, LOOK, WEIGH, "never", tools=[look, weigh], middleware=[limit])


@in_two_modes(
    "a limit of tool calls",
    *Expect.turns("model", "look", "look", apart=3),
    Expect("model", "a door", step=6),
    remark="ToolCallLimitMiddleware answers the call that is too many",
)
def tool_call_limit(kit: Kit) -> Program:
    limit = ToolCallLimitMiddleware(run_limit=1, exit_behavior="continue")
    yield run_agent(kit, LOOK, LOOK, "a door", middleware=[limit])


@in_two_modes(
    "a tool's error as a message",
    *Expect.turns("model", "drop", "it is stuck"),
    remark="ToolErrorMiddleware",
)
def tool_error(kit: Kit) -> Program:
    told = ToolErrorMiddleware(on_error=lambda error, request: f"It failed: {error}")
    agent = create_agent(kit.model, [drop], middleware=[told])
    yield kit.run(agent, kit.ask({"call": "drop", "args": {"what": "door"}}, "it is stuck"))


@topology(
    "a shell",
    *Expect.turns("model", "shell", "it said hello", first=2),
    modes=("invoke",),
    remark="ShellToolMiddleware",
)
def shell(kit: Kit) -> Program:
    agent = create_agent(kit.model, [], middleware=[ShellToolMiddleware()])
    asked = {"call": "shell", "args": {"command": "echo hello"}}
    yield kit.run(agent, kit.ask(asked, "it said hello"))


@in_two_modes(
    "a search through files",
    *Expect.turns("model", "glob_search", "grep_search", "found"),
    remark="FilesystemFileSearchMiddleware",
)
def file_search(kit: Kit) -> Program:
    root = str(Path(__file__).parents[1])
    search = FilesystemFileSearchMiddleware(root_path=root, use_ripgrep=False)
    glob = {"call": "glob_search", "args": {"pattern": "tools.py"}}
    grep = {"call": "grep_search", "args": {"pattern": "def look", "include": "tools.py"}}
    yield run_agent(kit, glob, grep, "found", tools=[], middleware=[search])


@in_two_modes(
    "middleware that refuses a reply",
    Expect("model", "Ask ann@example.com.", step=2),
    status="failed",
    raises=PIIDetectionError,
    remark="PIIMiddleware's strategy `block`: the call was made, and counts",
)
def refusing(kit: Kit) -> Program:
    block = PIIMiddleware("email", strategy="block", apply_to_input=False, apply_to_output=True)
    yield kit.run(
        create_agent(kit.model, [look], middleware=[block]), kit.ask("Ask ann@example.com.")
    )


@in_two_modes(
    "calls before and after an agent",
    Expect("opening.before_agent", "a plan", step=1),
    Expect("model", "a door", step=2),
    Expect("closing.after_agent", "well done", step=3),
)
def around_agent(kit: Kit) -> Program:
    def opening(state: Any, runtime: Any) -> Any:
        return {"messages": [(yield state["messages"])]}

    def closing(state: Any, runtime: Any) -> Any:
        return {"messages": [(yield state["messages"])]}

    middleware = [before_agent(talk(kit, opening)), after_agent(talk(kit, closing))]
    yield run_agent(kit, "a plan", "a door", "well done", middleware=middleware)


@in_two_modes(
    "a guard that sends the model back",
    *Expect.turns("model", "rude", "polite"),
    remark="`after_model` with `jump_to`",
)
def sent_back(kit: Kit) -> Program:
    @after_model(can_jump_to=["model"])
    def guard(state: Any, runtime: Any) -> Any:
        if state["messages"][-1].text == "rude":
            return {"messages": [HumanMessage("Be polite.")], "jump_to": "model"}
        return None

    yield run_agent(kit, "rude", "polite", middleware=[guard])


@in_two_modes(
    "a guard that ends the agent",
    Expect("model", "look", step=2),
    remark="`before_model` with `jump_to`",
)
def ended(kit: Kit) -> Program:
    @before_model(can_jump_to=["end"])
    def guard(state: Any, runtime: Any) -> Any:
        return {"jump_to": "end"} if len(state["messages"]) > 1 else None

    yield run_agent(kit, LOOK, "never", middleware=[guard])


@in_two_modes(
    "another model from the second step on",
    Expect("model", "look", step=1),
    Expect("model", "a door", step=3, why="other_policy"),
    remark="`wrap_model_call` overrides the request's model",
)
def other_model(kit: Kit) -> Program:
    rival = kit.chat(kit.rival)

    def choose(request: Any, handler: Any) -> Any:
        later = len(request.messages) > 1
        return (yield handler, request.override(model=rival) if later else request)

    middleware = [wrap_model_call(talk(kit, choose))]
    yield run_agent(kit, LOOK, "a door", middleware=middleware)


@in_two_modes(
    "a tool call that the model checks",
    *Expect.line(model="look", tools="not allowed"),
    Expect("model", "a pity", step=3),
    remark="`wrap_tool_call` asks, and answers in the tool's place",
)
def checked_tool(kit: Kit) -> Program:
    prompt = kit.says("not allowed")

    def check(request: Any, handler: Any) -> Any:
        said = yield prompt
        return ToolMessage(said.text, tool_call_id=request.tool_call["id"])

    yield run_agent(kit, LOOK, "a pity", middleware=[wrap_tool_call(talk(kit, check))])

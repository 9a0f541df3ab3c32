"""Agents with middleware: what it asks by itself, rewrites, retries, or holds back."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    SummarizationMiddleware,
    ToolRetryMiddleware,
    after_agent,
    before_agent,
    wrap_model_call,
)
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes, topology
from tests.conformance.suite.nodes import Failing, talk
from tests.conformance.suite.scripts import script
from tests.conformance.suite.tools import LOOK, WEIGH, look, run_agent, weigh


@topology(
    "summarising middleware",
    Expect("model", "look", step=2),
    Expect(
        "SummarizationMiddleware.before_model/summarization",
        "in short: " + script("", "a door"),
        step=4,
        node="SummarizationMiddleware.before_model",
    ),
    Expect("model", "a door", step=5),
    remark="its own call is a turn of its own; the shorter history starts a new row",
)
def summarising(kit: Kit) -> Program:
    summarise = SummarizationMiddleware(
        kit.model,
        trigger=("messages", 3),
        keep=("messages", 2),
        summary_prompt=kit.says("in short: " + script("", "a door")) + "{messages}",
    )
    yield run_agent(kit, LOOK, middleware=[summarise])


@topology(
    "context-editing middleware",
    *Expect.turns("model", "look", "weigh", "a heavy door"),
    remark="old tool results are cleared: the last prompt forks from its row",
)
def context_editing(kit: Kit) -> Program:
    edit = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
    yield run_agent(kit, LOOK, WEIGH, "a heavy door", tools=[look, weigh], middleware=[edit])


@topology(
    "model-fallback middleware",
    Expect("model", "", step=1, task="first", why="superseded_error"),
    Expect("model", "look", step=1, task="first"),
    Expect("model", "", step=3, task="second", why="superseded_error"),
    Expect("model", "a door", step=3, task="second"),
    remark="from a name that the server refuses",
)
def model_fallback(kit: Kit) -> Program:
    fall_back = ModelFallbackMiddleware(kit.model)
    agent = create_agent(kit.chat("nobody"), [look], middleware=[fall_back])
    yield kit.run(agent, kit.ask(LOOK, "a door"))


@topology(
    "tool-retry middleware",
    Expect("model", "ask", step=1),
    Expect("tools", "red", step=2, task="tool", why="superseded_error"),
    Expect("tools", "blue", step=2, task="tool"),
    Expect("model", "it is blue", step=3),
    remark="the model's answer inside of the failed try is thrown away",
)
def tool_retry(kit: Kit) -> Program:
    failing, colours = Failing(1, ValueError), iter(("red", "blue"))

    @tool
    def ask() -> str:
        """Ask."""
        return failing(kit.model.invoke(kit.says(next(colours))).text)

    retry = ToolRetryMiddleware(initial_delay=0.001, jitter=False)
    yield run_agent(kit, {"call": "ask"}, "it is blue", tools=[ask], middleware=[retry])


@topology(
    "a person approves, edits, rejects",
    *Expect.turns("model", "look", "weigh", apart=3),
    Expect("model", "drop it", step=6),
    threaded=True,
    remark="HumanInTheLoopMiddleware; an edited call forks from what was sampled",
)
def human_in_the_loop(kit: Kit) -> Program:
    hold = HumanInTheLoopMiddleware({"look": True, "weigh": True})
    agent = create_agent(kit.model, [look, weigh], middleware=[hold], checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask(LOOK, WEIGH, "drop it"))
    edited = {"name": "look", "args": {"what": "window"}}
    edit = {"type": "edit", "edited_action": edited}
    yield kit.run(agent, Command(resume={"decisions": [edit]}))
    reject = {"type": "reject", "message": "Too heavy."}
    yield kit.run(agent, Command(resume={"decisions": [reject]}))


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

"""Agents with middleware: what it asks by itself, rewrites, retries, or holds back."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    LLMToolEmulator,
    LLMToolSelectorMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    ToolRetryMiddleware,
    dynamic_prompt,
    wrap_model_call,
)
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from langchain_art import ChatART
from tests.conformance.suite.harness import Expect, Kit, Program, topology
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
    "trimming middleware",
    *Expect.turns("model", "look", "weigh", "a heavy door"),
    remark="the trimmed prompt starts a new row",
)
def trimming(kit: Kit) -> Program:
    def trim(request: Any, handler: Any) -> Any:
        first, *rest = request.messages
        return (yield handler, request.override(messages=[first, *rest[-2:]]))

    middleware = [wrap_model_call(talk(kit, trim))]
    agent = create_agent(kit.model, [look, weigh], middleware=middleware)
    last = {"call": "weigh", "args": {"what": script("a heavy door")}}  # the result leads on
    yield kit.run(agent, kit.ask(LOOK, last))


@topology(
    "context-editing middleware",
    *Expect.turns("model", "look", "weigh", "a heavy door"),
    remark="old tool results are cleared: the last prompt forks from its row",
)
def context_editing(kit: Kit) -> Program:
    edit = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
    yield run_agent(kit, LOOK, WEIGH, "a heavy door", tools=[look, weigh], middleware=[edit])


@topology(
    "a dynamic prompt",
    *Expect.turns("model", "look", "a door"),
    remark="the system prompt changes with the state: no prompt extends the last",
)
def changing_prompt(kit: Kit) -> Program:
    @dynamic_prompt
    def prompt(request: Any) -> str:
        return f"There are {len(request.messages)} messages."

    yield run_agent(kit, LOOK, "a door", middleware=[prompt])


@topology(
    "middleware that redacts replies",
    *Expect.turns("model", "Ask ann@example.com.", "a door", first=2, apart=4),
    remark="the next prompt does not repeat what was sampled: it forks there",
)
def redacting(kit: Kit) -> Program:
    redact = PIIMiddleware("email", apply_to_input=False, apply_to_output=True)
    yield run_agent(kit, {"say": "Ask ann@example.com.", **LOOK}, "a door", middleware=[redact])


class Unsteady(ChatART):
    """Cannot reach the server at first."""

    failing: Any

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self.failing()
        return super()._generate(*args, **kwargs)

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        self.failing()
        return await super()._agenerate(*args, **kwargs)

    def _stream(self, *args: Any, **kwargs: Any) -> Any:
        self.failing()
        yield from super()._stream(*args, **kwargs)

    async def _astream(self, *args: Any, **kwargs: Any) -> Any:
        self.failing()
        async for chunk in super()._astream(*args, **kwargs):
            yield chunk


@topology(
    "model-retry middleware",
    Expect("model", "", step=1, task="first", why="superseded_error"),
    Expect("model", "look", step=1, task="first"),
    Expect("model", "a door", step=3),
)
def model_retry(kit: Kit) -> Program:
    model = Unsteady(model=kit.served.policy, failing=Failing(1), **kit.address)
    retry = ModelRetryMiddleware(initial_delay=0.001, jitter=False)
    agent = create_agent(model, [look], middleware=[retry])
    yield kit.run(agent, kit.ask(LOOK, "a door"))


@topology(
    "middleware that asks again",
    Expect("model", "look", step=1, task="node", why="superseded_unchosen"),
    Expect("model", "look", step=1, task="node"),
    Expect("model", "a door", step=3, task="last", why="superseded_unchosen"),
    Expect("model", "a door", step=3, task="last"),
    remark="the node returns the last reply only",
)
def asking_again(kit: Kit) -> Program:
    def again(request: Any, handler: Any) -> Any:
        yield handler, request
        return (yield handler, request)

    yield run_agent(kit, LOOK, "a door", middleware=[wrap_model_call(talk(kit, again))])


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


@topology(
    "tool-selecting middleware",
    Expect(
        "model/tool_selection",
        '{"tools": ["look"]}',
        step=1,
        node="model",
        task="first",
    ),
    Expect("model", "look", step=1, task="first"),
    Expect(
        "model/tool_selection",
        '{"tools": ["weigh"]}',
        step=3,
        node="model",
        task="second",
    ),
    Expect("model", "a door", step=3, task="second"),
    remark="other tools are another prompt: each starts a row",
)
def tool_selecting(kit: Kit) -> Program:
    chosen = iter(("look", "weigh"))

    class Select(LLMToolSelectorMiddleware):
        def _prepare_selection_request(self, request: Any) -> Any:
            self.system_prompt = kit.says(f'{{"tools": ["{next(chosen)}"]}}')
            return super()._prepare_selection_request(request)

    agent = create_agent(
        kit.model,
        [look, weigh],
        system_prompt=kit.says(LOOK, "a door"),
        middleware=[Select(model=kit.model)],
    )
    yield kit.run(agent, {"messages": [("user", f"Look, {kit.number}.")]})


@topology(
    "a model that plays the tools",
    Expect("model", "look", step=1),
    Expect("tools/tool_emulation", "a red door", step=2, node="tools"),
    Expect("model", "it is red", step=3),
    remark="LLMToolEmulator",
)
def tool_emulator(kit: Kit) -> Program:
    asked = {"call": "look", "args": {"what": kit.says("a red door")}}
    yield run_agent(kit, asked, "it is red", middleware=[LLMToolEmulator(model=kit.model)])

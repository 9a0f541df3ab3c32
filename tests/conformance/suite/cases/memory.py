"""LangMem: memories that an agent writes and looks up, that a node extracts, and summaries."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import MessagesState
from langgraph.store.memory import InMemoryStore

from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import line, talk
from tests.conformance.suite.outcomes import same

_REMEMBER = {"call": "manage_memory", "args": {"content": "Ann likes doors", "action": "create"}}
_RECALL = {"call": "search_memory", "args": {"query": "Ann"}}


@topology(
    "an agent with memory tools",
    *Expect.turns("model", "manage_memory", "search_memory", "Ann likes doors"),
    remark="langmem, with LangGraph's store",
)
def remembering(kit: Kit) -> Program:
    from langmem import create_manage_memory_tool, create_search_memory_tool

    tools = [create_manage_memory_tool(("mine",)), create_search_memory_tool(("mine",))]
    agent = create_agent(kit.model, tools, store=InMemoryStore())
    yield kit.run(agent, kit.ask(_REMEMBER, _RECALL, "Ann likes doors"))


@topology(
    "memories extracted in a node",
    Expect("chat", "I am Ann", step=1),
    Expect("memorise/extract", "Memory", step=1),
    Expect("answer", "Ann it is", step=3),
    remark="langmem's manager is a graph of its own, whose calls are forced",
)
def extracting(kit: Kit) -> Program:
    from langmem import create_memory_manager

    manager = create_memory_manager(kit.model, enable_updates=False, enable_deletes=False)

    memory = {"call": "Memory", "args": {"content": "Ann likes doors"}}

    def memorise(state: Any) -> Any:
        asked = [state["messages"][-1], HumanMessage(kit.says(memory))]
        found = yield manager, {"messages": asked, "max_steps": 1}
        kept = "; ".join(one.content.content for one in found)
        return {"messages": [HumanMessage(f"{kept} {kit.says('Ann it is')}")]}

    graph = line(MessagesState, chat=kit.node(), memorise=talk(kit, memorise), answer=kit.node())
    yield kit.run(graph.compile(), kit.ask("I am Ann"))


class _Summarised(MessagesState):
    context: dict[str, Any]
    summarized_messages: list[Any]


@topology(
    "a history summarised by a node of LangMem",
    *Expect.line(chat="one", summarise="done", answer="end"),
    remark="the summary is asked for past the end of the script",
)
def summarising_node(kit: Kit) -> Program:
    from langmem.short_term import SummarizationNode

    summarise = SummarizationNode(
        model=kit.model,
        max_tokens=200,
        max_tokens_before_summary=8,
        max_summary_tokens=100,
        name="summarise",
    )

    def answer(state: Any) -> Any:
        said = yield [*state["summarized_messages"], HumanMessage(kit.says("end"))]
        same("what is sent to the node", type(said), AIMessage)
        return {"messages": [said]}

    graph = line(_Summarised, chat=kit.node(), summarise=summarise, answer=talk(kit, answer))
    yield kit.run(graph.compile(), kit.ask("one"))

"""Threads: interrupted and resumed, gone back in, failed and gone on with."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import MessagesState
from langgraph.types import Command, interrupt

from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import Failing, Said, beside, chain, line, talk
from tests.conformance.suite.outcomes import same


def careful(kit: Kit, *questions: str) -> Any:
    """A node that asks the model, then a person, once per question; it says which try it is."""
    tries = count(1)

    def body(state: Any) -> Generator[Any, AIMessage, Any]:
        number = next(tries)
        prompt = [*state["messages"]]
        for question in questions:
            reply = yield [*prompt, HumanMessage(kit.says(f"{question} {number}"))]
            prompt = [*prompt, reply, HumanMessage(interrupt(question))]
        return {"messages": prompt[len(state["messages"]) :]}

    return talk(kit, body)


@topology(
    "interrupt and resume",
    Expect("early", "e", step=1),
    Expect("careful", "sure? 1", step=2, task="careful", why="superseded_interrupted"),
    Expect("careful", "sure? 2", step=2, task="careful"),
    Expect("late", "done", step=3),
    threaded=True,
)
def resumed(kit: Kit) -> Program:
    graph = line(MessagesState, early=kit.node(), careful=careful(kit, "sure?"), late=kit.node())
    agent = graph.compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask("e"))
    yield kit.run(agent, Command(resume="yes"))


@topology(
    "several interrupts in one node",
    *Expect.turns(
        "careful",
        "sure? 1",
        "sure? 2",
        "really? 2",
        apart=0,
        task="careful",
        why="superseded_interrupted",
    ),
    *Expect.turns("careful", "sure? 3", "really? 3", apart=0, task="careful"),
    threaded=True,
)
def several_interrupts(kit: Kit) -> Program:
    graph = line(MessagesState, careful=careful(kit, "sure?", "really?"))
    agent = graph.compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask("unused"))
    yield kit.run(agent, Command(resume="yes"))
    yield kit.run(agent, Command(resume="yes, really"))


@topology(
    "interrupted, and not resumed",
    *Expect.line(early="e", careful="sure? 1"),
    threaded=True,
    status="interrupted",
    remark="what was said before the question is judged as it stands",
)
def waits(kit: Kit) -> Program:
    graph = line(MessagesState, early=kit.node(), careful=careful(kit, "sure?"))
    yield kit.run(graph.compile(checkpointer=InMemorySaver()), kit.ask("e"))


@topology("interrupt_before", *Expect.line(plan="p", act="a"), threaded=True)
def stops_before(kit: Kit) -> Program:
    graph = line(MessagesState, plan=kit.node(), act=kit.node())
    agent = graph.compile(checkpointer=InMemorySaver(), interrupt_before=["act"])
    yield kit.run(agent, kit.ask("p", "a"))
    same("the next node", agent.get_state(kit.config).next, ("act",))
    yield kit.run(agent, None)


@topology(
    "interrupt_after, and not resumed",
    Expect("plan", "p", step=1),
    threaded=True,
    status="interrupted",
)
def stops_after(kit: Kit) -> Program:
    graph = line(MessagesState, plan=kit.node(), act=kit.node())
    agent = graph.compile(checkpointer=InMemorySaver(), interrupt_after=["plan"])
    yield kit.run(agent, kit.ask("p", "a"))


@topology(
    "interrupts in parallel branches, resumed one by one",
    Expect("left", "left 1", step=1, task="left", why="superseded_interrupted"),
    Expect("right", "right 1", step=1, task="right", why="superseded_interrupted"),
    Expect("free", "f", step=1),
    Expect("left", "left 2", step=1, task="left"),
    Expect("right", "right 2", step=1, task="right", why="superseded_interrupted"),
    Expect("right", "right 3", step=1, task="right"),
    threaded=True,
    ordered=False,
    remark="a branch that had ended is not run again",
)
def parallel_interrupts(kit: Kit) -> Program:
    def says(reply: str) -> Any:
        return {"messages": [("user", kit.says(reply))]}

    graph = beside(
        MessagesState, left=careful(kit, "left"), right=careful(kit, "right"), free=kit.node()
    )
    agent = graph.compile(checkpointer=InMemorySaver())
    yield kit.run(agent, says("f"))
    waiting = {one.value: one.id for one in agent.get_state(kit.config).interrupts}
    yield kit.run(agent, Command(resume={waiting["left"]: "1"}))
    yield kit.run(agent, Command(resume={waiting["right"]: "2"}))


@topology(
    "an interrupt inside of a subgraph",
    Expect("team/early", "e", step=1),
    Expect("team/careful", "sure? 1", step=2, task="careful", why="superseded_interrupted"),
    Expect("team/careful", "sure? 2", step=2, task="careful"),
    Expect("late", "done", step=2),
    threaded=True,
)
def subgraph_interrupt(kit: Kit) -> Program:
    team = line(MessagesState, early=kit.node(), careful=careful(kit, "sure?")).compile()
    agent = line(MessagesState, team=team, late=kit.node()).compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask("e"))
    yield kit.run(agent, Command(resume="yes"))


@topology(
    "a graph on a thread of its own, left waiting",
    Expect("asks/careful", "sure? 1", step=1, threaded=True),
    Expect("goes_on", "fine", step=2),
    remark="the node around it goes on, so the run is complete",
)
def inner_waits(kit: Kit) -> Program:
    inner = line(MessagesState, careful=careful(kit, "sure?")).compile(InMemorySaver())
    thread: Any = {"configurable": {"thread_id": kit.thread}}

    def asks(state: Any) -> Any:
        yield inner.with_config(thread), state

    graph = line(MessagesState, asks=talk(kit, asks), goes_on=kit.node())
    yield kit.run(graph.compile(), kit.ask("fine"))


@topology(
    "tasks of the functional API, kept over an interrupt",
    *Expect.turns("flow/draft", "one", "yes", first=0, apart=0),
    threaded=True,
)
def functional_interrupt(kit: Kit) -> Program:
    def draft(text: str) -> Any:
        return (yield kit.says(text)).text

    drafts = task(talk(kit, draft))

    def flow(text: str) -> Any:
        yield drafts, text
        return (yield drafts, interrupt("sure?"))

    flow = entrypoint(checkpointer=InMemorySaver())(talk(kit, flow))
    yield kit.run(flow, "one")
    yield kit.run(flow, Command(resume="yes"))


@topology(
    "time travel: replayed and forked in one run",
    *Expect.line(plan="p", act="a"),
    Expect("act", "a", step=3, task="replayed"),
    Expect("act", "other", step=3, task="forked"),
    threaded=True,
    remark="the program saw each outcome, so each call counts",
)
def time_travel(kit: Kit) -> Program:
    graph = line(MessagesState, plan=kit.node(), act=kit.node())
    agent = graph.compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask("p", "a"))
    history = list(agent.get_state_history(kit.config))
    before = next(state for state in history if state.next == ("act",)).config
    yield kit.run(agent, None, before)
    said = {"messages": [HumanMessage(kit.says("other"))]}
    yield kit.run(agent, None, agent.update_state(before, said))


@topology(
    "a failed thread that goes on where it stopped",
    Expect("team/early", "e", step=1),
    Expect("team/shaky", "s", step=2, task="shaky", why="superseded_retried"),
    Expect("beside", "b", step=1),
    Expect("team/shaky", "s", step=2, task="shaky"),
    threaded=True,
    ordered=False,
)
def failed_thread(kit: Kit) -> Program:
    shaky = chain(kit, "s", then=Failing(1))
    team = line(Said, early=chain(kit, "e"), shaky=shaky).compile()
    agent = beside(Said, team=team, beside=chain(kit, "b")).compile(InMemorySaver())
    try:
        yield kit.run(agent, {"said": []})
    except ConnectionError:
        yield kit.run(agent, None)


@topology(
    "several turns of one thread", *Expect.turns("answer", "one", "two", apart=3), threaded=True
)
def turns_of_a_thread(kit: Kit) -> Program:
    agent = line(MessagesState, answer=kit.node()).compile(checkpointer=InMemorySaver())
    yield kit.run(agent, kit.ask("one", "two"))
    yield kit.run(agent, {"messages": [("user", "And?")]})

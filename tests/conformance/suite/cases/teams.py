"""Teams of agents under a supervisor or in a swarm; tasks of the functional API."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.types import CachePolicy

from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes
from tests.conformance.suite.nodes import RETRY, Failing, Said, chain, line, talk
from tests.conformance.suite.tools import look


def _to(name: str) -> dict[str, str]:
    return {"call": f"transfer_to_{name}"}


@in_two_modes(
    "supervisors under a supervisor",
    Expect("top/agent", "transfer_to_scouts", step=1),
    Expect("scouts/lead/agent", "transfer_to_scout", step=1),
    Expect("scouts/scout/model", "a door", step=1),
    Expect("scouts/lead/agent", "found", step=1),
    Expect("top/agent", "it is a door", step=1),
    remark="langgraph-supervisor",
)
def supervisors(kit: Kit) -> Program:
    from langgraph_supervisor import create_supervisor

    scout = create_agent(kit.model, [look], name="scout")
    scouts = create_supervisor([scout], model=kit.model, supervisor_name="lead")
    team = create_supervisor(
        [scouts.compile(name="scouts")], model=kit.model, supervisor_name="top"
    ).compile()
    # A supervisor adds replies of its own ("Transferring back"), which count: the lead says step 4.
    asked = kit.ask(_to("scouts"), _to("scout"), "a door", "it is a door", "found")
    yield kit.run(team, asked)


@in_two_modes(
    "a supervisor that forwards a message",
    Expect("supervisor/agent", "transfer_to_scout", step=1),
    Expect("scout/model", "a door", step=1),
    Expect("supervisor/agent", "forward_message", step=1),
    remark="`create_forward_message_tool`: the last words are the scout's, sampled once",
)
def forwarding(kit: Kit) -> Program:
    from langgraph_supervisor import create_supervisor
    from langgraph_supervisor.handoff import create_forward_message_tool

    scout = create_agent(kit.model, [look], name="scout")
    forward = create_forward_message_tool("supervisor")
    team = create_supervisor([scout], model=kit.model, tools=[forward]).compile()
    last = {"call": "forward_message", "args": {"from_agent": "scout"}}
    yield kit.run(team, kit.ask(_to("scout"), "a door", "not asked for", last))


@in_two_modes(
    "a swarm that remembers who spoke",
    Expect("scout/model", "transfer_to_smith", step=1),
    *Expect.turns("smith/model", "here", "transfer_to_scout", apart=0),
    Expect("scout/model", "back", step=1),
    threaded=True,
    remark="langgraph-swarm; two turns of one thread, the second begins with the second agent",
)
def swarm_thread(kit: Kit) -> Program:
    from langgraph_swarm import create_handoff_tool, create_swarm

    agents = [
        create_agent(kit.model, [create_handoff_tool(agent_name=other)], name=name)
        for name, other in (("scout", "smith"), ("smith", "scout"))
    ]
    swarm = create_swarm(agents, default_active_agent="scout")
    team = swarm.compile(checkpointer=InMemorySaver())
    yield kit.run(team, kit.ask(_to("smith"), "here", _to("scout"), "back"))
    yield kit.run(team, {"messages": [("user", "And?")]})


def _task(kit: Kit, words: str, then: Any = None, **options: Any) -> Any:
    """A task of the functional API that asks the model."""

    def part(name: str) -> Any:
        reply = (yield kit.says(words + name)).text
        return then(reply) if then else reply

    return task(talk(kit, part), **options)


def _flow(kit: Kit, part: Any, names: str, **options: Any) -> Any:
    """An entrypoint that starts one task for each letter of `names`, then gathers them."""

    def flow(given: Any) -> Any:
        said: list[Any] = []
        for one in [part(name) for name in names]:
            said.append((yield lambda begun: begun, one))
        return said

    return entrypoint(**options)(talk(kit, flow))


@in_two_modes(
    "tasks in parallel",
    *(Expect("flow/part", f"part {name}", step=0) for name in "abc"),
    ordered=False,
    remark="the functional API's futures",
)
def parallel_tasks(kit: Kit) -> Program:
    yield kit.run(_flow(kit, _task(kit, "part "), "abc"), "go")


@in_two_modes(
    "a task that is retried",
    Expect("flow/part", "part a", step=0, task="part", why="superseded_retried"),
    Expect("flow/part", "part a", step=0, task="part", attempt=2),
    remark="`@task(retry_policy=…)`",
)
def retried_task(kit: Kit) -> Program:
    part = _task(kit, "part ", Failing(1), retry_policy=RETRY)
    yield kit.run(_flow(kit, part, "a"), "go")


@in_two_modes(
    "a task from the cache",
    Expect("flow/part", "part a", step=0),
    remark="`@task(cache_policy=…)`; the second run makes no call",
)
def cached_task(kit: Kit) -> Program:
    flow = _flow(kit, _task(kit, "part ", cache_policy=CachePolicy()), "a", cache=InMemoryCache())
    yield kit.run(flow, "go")
    yield kit.run(flow, "go")


@in_two_modes(
    "an entrypoint with a memory of its own",
    *Expect.turns("chat", "one", "two", first=0),
    threaded=True,
    remark="`previous` and `entrypoint.final`",
)
def entrypoint_memory(kit: Kit) -> Program:
    def chat(text: str, *, previous: Any = None) -> Any:
        asked = [*(previous or []), HumanMessage(text)]
        reply = yield asked
        return entrypoint.final(value=reply, save=[*asked, reply])

    chat = entrypoint(checkpointer=InMemorySaver())(talk(kit, chat))
    yield kit.run(chat, kit.says("one", "two"))
    yield kit.run(chat, "And?")


@in_two_modes(
    "an entrypoint as a node",
    Expect("early", "e", step=1),
    Expect("flow/flow/part", "part a", step=0),
    Expect("late", "l", step=3),
)
def entrypoint_node(kit: Kit) -> Program:
    flow = _flow(kit, _task(kit, "part "), "a")
    # Its result is no state: the node gives the graph a state's update.
    kept = flow | (lambda parts: {"said": parts})
    yield kit.run(
        line(Said, early=chain(kit, "e"), flow=kept, late=chain(kit, "l")).compile(), {"said": []}
    )

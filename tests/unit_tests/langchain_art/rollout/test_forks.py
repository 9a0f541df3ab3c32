"""Runs that are continued from a checkpoint: what runs again, what is recorded, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.cache.memory import InMemoryCache
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.pregel.remote import RemoteGraph
from langgraph.types import CachePolicy, RetryPolicy, Send, interrupt

from langchain_art.call_seeds import RunSeed, run_seed
from langchain_art.errors import ConfigError, RolloutFailed
from langchain_art.rollout.fork_worker import ForkWorker
from langchain_art.rollout.forks import FORK, Forks
from langchain_art.wire import Trajectory

ASK = "Which way?"


class Numbered(BaseChatModel):
    """Says how often it was asked, so that no two replies are alike."""

    said: list[int]

    @property
    def _llm_type(self) -> str:
        return "numbered"

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        self.said.append(len(self.said))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"r{self.said[-1]}"))])


class Program:
    """Nodes that count how often they run."""

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.model, self.runs = Numbered(said=[]), Counter[str]()
        self.asynchronous = asynchronous

    def node(self, name: str, then: Callable[[Any], Any] | None = None) -> Any:
        """A node that calls the model; `then` is what it does afterwards."""

        def plain(state: Any) -> Any:
            self.runs[name] += 1
            said = {"messages": [self.model.invoke(state["messages"])]}
            return said if then is None else then(state) or said

        async def coroutine(state: Any) -> Any:
            self.runs[name] += 1
            said = {"messages": [await self.model.ainvoke(state["messages"])]}
            return said if then is None else then(state) or said

        return coroutine if self.asynchronous else plain

    def silent(self, name: str) -> Any:
        """A node that calls no model."""

        def act(state: Any) -> Any:
            self.runs[name] += 1
            return {"messages": [("user", f"{name} was here")]}

        return act

    def line(self, *names: str, **nodes: Any) -> StateGraph[Any]:
        graph, last = StateGraph(MessagesState), START
        for name in names:
            graph.add_node(name, nodes.get(name) or self.node(name))
            graph.add_edge(last, name)
            last = name
        return graph.add_edge(last, END)


async def runs_of(graph: Any, forks: Forks, **options: Any) -> list[Trajectory]:
    worker = ForkWorker(graph, 2, forks=forks, **options)
    worker.expect(forks.runs)
    return await worker.run(ASK, "q")


def says(run: Trajectory) -> list[tuple[str, str]]:
    return [("/".join(one.path), str((one.reply or {})["content"])) for one in run.turns]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_follows_a_decision_runs_again_and_what_came_before_does_not(
    asynchronous: bool,
) -> None:
    made = Program(asynchronous=asynchronous)
    graph = made.line("plan", "choose", "act").compile(InMemorySaver())
    forks = Forks(at=("choose",), continuations=2, run_again=("act",))
    trunk, one, two = await runs_of(graph, forks)
    assert made.runs == {"plan": 1, "choose": 3, "act": 3}
    assert says(trunk) == [("plan", "r0"), ("choose", "r1"), ("act", "r2")]
    assert says(one) == [("choose", "r3"), ("act", "r4")]
    assert says(two) == [("choose", "r5"), ("act", "r6")]
    for branch, own in ((one, ["r3", "r4"]), (two, ["r5", "r6"])):
        assert branch.metadata[FORK] == {"of": trunk.id, "node": "choose", "turns": 1}
        assert branch.status == "completed" and branch.scenario == "q"
        assert branch.input == trunk.input and branch.input is not None
        said = [message["content"] for message in branch.output["messages"]]
        assert said == [ASK, "r0", *own]  # the state of the checkpoint, and nothing of the others
        first, second = branch.turns
        assert [m["content"] for m in branch.prompt(0)] == [ASK, "r0"]
        assert first.extends is None and second.extends == 0
        assert (first.attempt, first.excluded_because, first.thread) == (1, None, trunk.id)
        assert first.namespace != trunk.turns[1].namespace
    assert FORK not in trunk.metadata
    calls = [turn.namespace for run in (trunk, one, two) for turn in run.turns]
    assert len(set(calls)) == len(calls)


async def test_two_nodes_each_branch_the_run_and_not_each_others_branches() -> None:
    made = Program()
    graph = made.line("plan", "choose", "act").compile(InMemorySaver())
    forks = Forks(at=("choose", "act"), continuations=2)
    trunk, *branches = await runs_of(graph, forks)
    places = [(one.metadata[FORK]["node"], one.metadata[FORK]["turns"]) for one in branches]
    assert places == [("choose", 1), ("choose", 1), ("act", 2), ("act", 2)]
    assert [len(one.turns) for one in branches] == [2, 2, 1, 1]
    assert [m["content"] for m in branches[2].prompt(0)] == [ASK, *(r for _, r in says(trunk)[:2])]


async def test_of_several_visits_one_is_drawn() -> None:
    """By the run's seed: the same again, and others for others, so that each has its turn."""
    drawn = list[int]()
    for seed in [*range(24), *range(24)]:
        run_seed.set(RunSeed(seed))
        made = Program()
        built = StateGraph(MessagesState)
        built.add_node("agent", made.node("agent"))
        built.add_edge(START, "agent")
        ends = lambda state: "agent" if len(state["messages"]) < 4 else END  # noqa: E731
        built.add_conditional_edges("agent", ends, ["agent", END])
        trunk, branch = await runs_of(built.compile(InMemorySaver()), Forks(("agent",), 1))
        turns = branch.metadata[FORK]["turns"]
        assert len(trunk.turns) == 3 and len(branch.turns) == 3 - turns
        drawn.append(turns)
    assert drawn[:24] == drawn[24:] and set(drawn) == {0, 1, 2}


async def test_a_subgraph_is_run_again_as_a_whole() -> None:
    made = Program()
    team = made.line("draft", "check").compile()
    graph = made.line("plan", "team", "act", team=team).compile(InMemorySaver())
    forks = Forks(at=("team",), continuations=1, run_again=("act",))
    trunk, branch = await runs_of(graph, forks)
    assert made.runs == {"plan": 1, "draft": 2, "check": 2, "act": 2}
    assert [path for path, _ in says(branch)] == ["team/draft", "team/check", "act"]
    assert branch.metadata[FORK]["turns"] == 1 and len(trunk.turns) == 4
    later = Forks(at=("act",), continuations=1)  # behind the subgraph's calls
    trunk, branch = await runs_of(graph, later)
    assert branch.metadata[FORK]["turns"] == 3


async def test_a_subgraph_with_a_memory_begins_as_it_was_at_the_checkpoint() -> None:
    made = Program()
    memory = made.line("recall").compile(checkpointer=True)
    built = made.line("plan", "team", "again", team=memory, again=made.node("again"))
    graph = built.compile(InMemorySaver())
    forks = Forks(at=("team",), continuations=2, run_again=("again",))
    trunk, one, two = await runs_of(graph, forks)
    asked = len(trunk.prompt(1))
    assert [len(run.prompt(0)) for run in (one, two)] == [asked, asked]


async def test_retries_within_a_continuation_are_its_own() -> None:
    made, failed = Program(), list[str]()

    def fails_once(state: Any) -> None:
        if made.runs["act"] == 2:  # the first time of the first continuation
            failed.append("act")
            raise ConnectionError("flaky")

    retry = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ConnectionError)
    built = made.line("plan", "choose")
    built.add_node("act", made.node("act", fails_once), retry_policy=retry)
    built.add_edge("choose", "act")
    forks = Forks(at=("choose",), continuations=1, run_again=("act",))
    trunk, branch = await runs_of(built.compile(InMemorySaver()), forks)
    assert failed and [turn.excluded_because for turn in trunk.turns] == [None] * 3
    assert [(t.node, t.attempt, t.excluded_because) for t in branch.turns] == [
        ("choose", 1, None),
        ("act", 1, "retried"),
        ("act", 2, None),
    ]


async def test_a_continuation_that_fails_is_counted_and_the_others_go_on() -> None:
    made = Program()

    def fails(state: Any) -> None:
        if made.runs["act"] == 2:
            raise ValueError("broken")

    graph = made.line("choose", "act", act=made.node("act", fails)).compile(InMemorySaver())
    forks = Forks(at=("choose",), continuations=2, run_again=("act",))
    trunk, one, two = await runs_of(graph, forks)
    assert [run.status for run in (trunk, one, two)] == ["completed", "failed", "completed"]
    assert one.metadata[FORK]["of"] == trunk.id and "broken" in (one.error or "")


async def test_a_run_that_fails_is_not_continued() -> None:
    made = Program()

    def fails(state: Any) -> None:
        raise ValueError("broken")

    graph = made.line("choose", "act", act=made.node("act", fails)).compile(InMemorySaver())
    forks = Forks(at=("choose",), run_again=("act",))
    [trunk] = await runs_of(graph, forks, max_failed=1.0)
    assert trunk.status == "failed" and made.runs == {"choose": 1, "act": 1}
    with pytest.raises(RolloutFailed, match="broken"):
        await runs_of(graph, forks, max_failed=0.0)


async def test_a_run_that_does_not_come_to_the_node_is_left_as_it_is() -> None:
    made = Program()
    built = made.line("plan", "choose")
    built.add_node("never", made.node("never"))
    [trunk] = await runs_of(built.compile(InMemorySaver()), Forks(at=("never",)))
    assert len(trunk.turns) == 2
    quiet = made.line("plan", "look", look=made.silent("look")).compile(InMemorySaver())
    [trunk] = await runs_of(quiet, Forks(at=("look",)))  # it calls no model: it decides nothing
    assert len(trunk.turns) == 1


async def test_an_agent_with_tools_on_a_saver_of_its_own() -> None:
    looked = list[str]()

    @tool
    def look(where: str) -> str:
        """Look somewhere."""
        looked.append(where)
        return "nothing"

    class Caller(Numbered):
        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self

        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
            self.said.append(len(self.said))
            calls = [{"name": "look", "args": {"where": f"w{self.said[-1]}"}, "id": "1"}]
            again = isinstance(messages[-1], AIMessage) or messages[-1].type == "tool"
            reply = AIMessage(f"r{self.said[-1]}", tool_calls=[] if again else calls)
            return ChatResult(generations=[ChatGeneration(message=reply)])

    async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
        agent = create_agent(Caller(said=[]), [look], checkpointer=saver)
        with pytest.raises(ConfigError, match=r"'tools' a second time.* model → tools lead"):
            ForkWorker(agent, 1, forks=Forks(at=("model",)))
        found = await runs_of(agent, Forks(at=("model",), continuations=3, run_again=("tools",)))
    assert len(found) == 4
    turns = found[1].metadata[FORK]["turns"]
    assert len(looked) == (4 if turns == 0 else 1)


# --- what is refused ------------------------------------------------------------------------------


def refused(graph: Any, forks: Forks, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ForkWorker(graph, 1, forks=forks)


def test_what_cannot_be_continued_is_refused_by_name() -> None:
    made, forks = Program(), Forks(at=("choose",), run_again=("act",))
    built = made.line("choose", "act")
    refused(built.compile(), forks, r"checkpointer=None, expected one .*InMemorySaver\(\)")
    refused(built.compile(checkpointer=True), forks, "checkpointer=True, expected one")
    waits = built.compile(InMemorySaver(), interrupt_before=["act"])
    refused(waits, forks, "a graph with interrupt_before or interrupt_after")
    remote = RemoteGraph("agent", url="http://localhost:1")
    refused(remote, forks, "a RemoteGraph, whose calls this process does not hear")
    refused(lambda scenario: 1.0, forks, "the rollout <function .*, expected a compiled StateGraph")
    refused(made.model, forks, "the rollout Numbered, expected a compiled StateGraph")
    graph = built.compile(InMemorySaver())
    refused(graph, Forks(at=("chose",)), "'chose' is no node of .* 'choose', 'act'")
    inner = Forks(at=("choose",), run_again=("act/inner",))
    refused(graph, inner, "'act/inner' is no node of the graph itself.*A subgraph is named by")
    cached = StateGraph(MessagesState)
    cached.add_node("choose", made.node("choose"), cache_policy=CachePolicy())
    cached.add_edge(START, "choose")
    kept = cached.compile(InMemorySaver(), cache=InMemoryCache())
    refused(kept, Forks(at=("choose",)), "the node 'choose', whose result is cached")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"at": "choose"}, "got at='choose', expected names"),
        ({"at": ()}, r"got at=\(\), expected the nodes"),
        ({"at": ("",)}, "expected names"),
        ({"at": ("a",), "run_again": "b"}, "got run_again='b', expected names"),
        ({"at": ("a",), "continuations": 0}, "continuations=0, expected a number from 1 to 64"),
        ({"at": ("a",), "continuations": True}, "continuations=True, expected a number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Forks(**given)


def test_a_node_to_which_edges_lead_must_be_stated() -> None:
    made = Program()
    graph = made.line("plan", "choose", "act", "send").compile(InMemorySaver())
    forks = Forks(at=("choose",), run_again=("act",))
    refused(graph, forks, "'send' a second time.*edges choose → act → send lead")
    assert not made.runs
    goes = StateGraph(MessagesState)
    goes.add_node("choose", made.node("choose"), destinations=("mail",))
    goes.add_node("mail", made.node("mail"))
    goes.add_edge(START, "choose")
    refused(goes.compile(InMemorySaver()), Forks(at=("choose",)), "choose → mail lead there")


def hidden(made: Program, way: Callable[[int], str]) -> Any:
    """A graph whose edges do not tell where `choose` leads; `way` does, by how often it ran."""

    def route(state: Any) -> Any:
        return way(made.runs["choose"])

    built = StateGraph(MessagesState)
    for name in ("choose", "act", "mail"):
        built.add_node(name, made.node(name))
    built.add_edge(START, "choose")
    built.add_conditional_edges("choose", route)
    return built.compile(InMemorySaver())


async def test_a_node_that_the_run_came_to_is_refused_before_any_continuation() -> None:
    made = Program()
    graph = hidden(made, lambda ran: "mail")
    with pytest.raises(ConfigError, match=r"'mail' a second time.*It ran in step 2 of the run"):
        await runs_of(graph, Forks(at=("choose",), run_again=("act",)))
    assert made.runs == {"choose": 1, "mail": 1}


async def test_a_continuation_is_stopped_before_a_node_that_is_not_stated() -> None:
    made = Program()
    graph = hidden(made, lambda ran: "act" if ran < 3 else "mail")
    with pytest.raises(ConfigError, match=r"'mail' a second time.*was stopped before it"):
        await runs_of(graph, Forks(at=("choose",), continuations=5, run_again=("act",)))
    assert made.runs == {"choose": 3, "act": 2}  # and not once the mail


async def test_interrupts_are_refused_by_name() -> None:
    made = Program()

    def asks(state: Any) -> None:
        interrupt("sure?")

    graph = made.line("choose", "act", act=made.node("act", asks)).compile(InMemorySaver())
    forks = Forks(at=("choose",), run_again=("act",))
    with pytest.raises(ConfigError, match="a run that was interrupted at 'act'; a run must"):
        await runs_of(graph, forks)
    made = Program()

    def later(state: Any) -> None:
        if made.runs["act"] == 2:
            interrupt("sure?")

    graph = made.line("choose", "act", act=made.node("act", later)).compile(InMemorySaver())
    with pytest.raises(ConfigError, match="a run that was interrupted at 'act'; a run must"):
        await runs_of(graph, forks)
    assert made.runs["choose"] == 2


def after(state: list[Any], writes: Sequence[list[Any]]) -> list[Any]:
    return [*state, *(one for some in writes for one in some)]


class Deltas(TypedDict):
    messages: Annotated[list[Any], DeltaChannel(after)]


async def test_a_state_that_is_kept_as_its_changes() -> None:
    made = Program()
    built, last = StateGraph(Deltas), START
    for name in ("plan", "choose", "act"):
        built.add_node(name, made.node(name))
        built.add_edge(last, name)
        last = name
    forks = Forks(at=("choose", "act"), continuations=2)
    found = await runs_of(built.compile(InMemorySaver()), forks)
    said = [[one["content"] for one in run.output["messages"][1:]] for run in found]
    assert said == [
        ["r0", "r1", "r2"],
        *(["r0", "r3", "r4"], ["r0", "r5", "r6"]),
        *(["r0", "r1", "r7"], ["r0", "r1", "r8"]),
    ]


class Many(TypedDict):
    messages: Annotated[list[Any], lambda a, b: [*a, *b]]


async def test_a_task_of_send_is_refused() -> None:
    made = Program()
    built = StateGraph(Many)
    for name in ("plan", "work", "join"):
        built.add_node(name, made.node(name))
    built.add_edge(START, "plan")
    built.add_conditional_edges(
        "plan", lambda state: [Send("work", state), Send("work", state)], ["work"]
    )
    built.add_edge("work", "join")
    graph = built.compile(InMemorySaver())
    with pytest.raises(ConfigError, match="'work' in a step whose tasks were made by Send"):
        await runs_of(graph, Forks(at=("work",), run_again=("join",)))
    made.runs.clear()
    before = Forks(at=("plan",), continuations=1, run_again=("work", "join"))
    trunk, branch = await runs_of(graph, before)  # what is sent after the branch is no trouble
    assert made.runs == {"plan": 2, "work": 4, "join": 2}
    assert len(trunk.turns) == len(branch.turns) == 4
    behind = Forks(at=("join",), continuations=1)
    trunk, branch = await runs_of(graph, behind)
    assert branch.metadata[FORK]["turns"] == 3 and len(branch.turns) == 1

"""What a topology is made of: `topology`, `Expect`, `Kit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, TypeVar
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langgraph.pregel.protocol import PregelProtocol

from langchain_art.chat_models.chat_art import ChatART
from langchain_art.errors import ConfigError
from langchain_art.tracing.handler import CaptureHandler
from tests.conformance.suite.outcomes import CannotBeChecked
from tests.conformance.suite.scripts import script

T = TypeVar("T")
Mode = Literal["invoke", "ainvoke", "stream", "astream"]
MODES: tuple[Mode, ...] = ("invoke", "ainvoke", "stream", "astream")
TWO_MODES: tuple[Mode, ...] = ("invoke", "astream")
"""Of a topology whose calls are made as another's, which has all four."""
RunStep: TypeAlias = "Callable[[], Any]"
Program: TypeAlias = "Generator[RunStep, Any, None]"
"""Yields what is to be run, one after the other (`Kit.run`), and is sent each result."""


@dataclass(frozen=True)
class Served:
    """Where the models of the programs are, and what they are called."""

    base_url: str
    """Of chat completions; ends with ``/v1``."""
    policy: str
    """The model whose calls are trained."""
    rival: str | None = "rival"
    """A second policy; None: there is none."""
    base_model: str | None = "base_model"
    """The model that no training changes; None: there is none."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of every `ChatART`."""


@dataclass(frozen=True)
class Expect:
    """One model call that a program makes."""

    path: str
    """Node names from the outside in, joined by ``/``; empty outside of any graph."""
    says: str
    """The reply's text; without text, the names of the tools it calls: ``look, look``."""
    step: int | None = None
    node: str | None = None
    """LangGraph's name of the node; None: the path's last part."""
    task: str = ""
    """Calls with one label share a checkpoint namespace. Without a label it is a call's own."""
    attempt: int = 1
    why: str | None = None
    """Why it is not trained, in `TrainResult.excluded`'s words: ``foreign``, ``grammar``,
    ``other_policy``, ``lost``, ``superseded_retried`` …; None: it is trained."""
    tags: tuple[str, ...] = ()
    threaded: bool | None = None
    """Whether the call belongs to the kit's thread; None: as the topology."""

    @staticmethod
    def turns(path: str, *says: str, first: int = 1, apart: int = 2, **more: Any) -> list[Expect]:
        """Calls of one node, `apart` steps from each other: an agent's, with tools between them."""
        return [Expect(path, one, first + apart * at, **more) for at, one in enumerate(says)]

    @staticmethod
    def line(**says: str) -> list[Expect]:
        """One call of each node of a graph whose nodes run one after the other."""
        return [Expect(path, one, step) for step, (path, one) in enumerate(says.items(), 1)]


@dataclass(frozen=True)
class Topology:
    """One shape, its calls, and what may be said of it in the table."""

    name: str
    program: Callable[[Kit], Program]
    expects: tuple[Expect, ...]
    ordered: bool = True
    """False: parallel branches, whose calls start in any order."""
    threaded: bool = False
    """Every run has a thread (``kit.config``): for programs with a checkpointer."""
    heard: Literal["scope", "handler", "server"] = "scope"
    """By `capture()`; by ``kit.handler`` alone; by the server alone, from tagged calls."""
    status: str = "completed"
    raises: type[BaseException] | None = None
    """What leaves the program."""
    modes: tuple[Mode, ...] = MODES
    remark: str = ""
    """For the table: what is special; why a mode is missing."""

    @property
    def excluded(self) -> Counter[str]:
        """Reason -> calls that are not trained."""
        return Counter(expect.why for expect in self.expects if expect.why)

    @property
    def trained(self) -> int:
        """Calls that are."""
        return sum(expect.why is None for expect in self.expects)


TOPOLOGIES: dict[str, Topology] = {}


def topology(
    name: str, *expects: Expect, **options: Any
) -> Callable[[Callable[[Kit], Program]], Callable[[Kit], Program]]:
    """Registers a program under a name that says its shape; `options` are `Topology`'s."""

    def register(program: Callable[[Kit], Program]) -> Callable[[Kit], Program]:
        if name in TOPOLOGIES:
            raise ConfigError(f"two topologies are named {name!r}")
        TOPOLOGIES[name] = Topology(name, program, expects, **options)
        return program

    return register


in_two_modes = partial(topology, modes=TWO_MODES)


class Foreign(BaseChatModel):
    """A model of somebody else's: says the next line, takes tools."""

    lines: list[Any]
    name_: str = "foreign-1"

    @property
    def _llm_type(self) -> str:
        return "foreign"

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
        return {"ls_provider": "elsewhere", "ls_model_name": self.name_, "ls_model_type": "chat"}

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """With the names of these tools."""
        return self.bind(tools=[{"type": "function", "function": {"name": t.name}} for t in tools])

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        line = self.lines.pop(0)
        reply = AIMessage(line) if isinstance(line, str) else line
        return ChatResult(generations=[ChatGeneration(message=reply)])


@dataclass
class Kit:
    """What a program is built with: models, a thread, and the way it is to be run.

    Nodes that call a model themselves choose by `asynchronous`; `node` makes the plainest one.
    """

    served: Served
    mode: Mode
    number: int = 0
    """Which run of the group; every prompt of `ask` begins with it, so that runs differ."""
    handler: CaptureHandler = field(default_factory=CaptureHandler)
    thread: str = field(default_factory=lambda: str(uuid4()))
    threaded: bool = False

    @property
    def asynchronous(self) -> bool:
        """Whether the program is to await its models."""
        return self.mode in ("ainvoke", "astream")

    @property
    def streaming(self) -> bool:
        """Whether its graphs are streamed."""
        return self.mode in ("stream", "astream")

    @cached_property
    def model(self) -> ChatART:
        """The policy that is trained."""
        return self.chat()

    def chat(self, name: str | None = None, **options: Any) -> ChatART:
        """Any model of the server: by default the policy that is trained."""
        return ChatART(model=name or self.served.policy, **self.address, **options)

    @property
    def address(self) -> dict[str, Any]:
        """Arguments of every `ChatART`, but for the model's name."""
        return {"base_url": self.served.base_url, **self.served.options}

    @property
    def rival(self) -> str:
        """The name of a second policy. Raises CannotBeChecked if the server has none."""
        if self.served.rival is None:
            raise CannotBeChecked("needs a second policy (POST /v1/policies)")
        return self.served.rival

    @property
    def base_model(self) -> str:
        """The name of the base model. Raises CannotBeChecked if the server does not tell."""
        if self.served.base_model is None:
            raise CannotBeChecked("needs the base model's name (GET /status)")
        return self.served.base_model

    def foreign(self, *lines: Any) -> Foreign:
        """A model that our server does not serve."""
        return Foreign(lines=list(lines))

    def says(self, *steps: Any) -> str:
        """A prompt's text that leads the model: reply number k after it is step k."""
        intro = f"Run {self.number}."
        return script(*steps, intro=intro) if steps else intro

    def ask(self, *steps: Any) -> dict[str, Any]:
        """A state with that prompt."""
        return {"messages": [("user", self.says(*steps))]}

    def node(self, model: Runnable[Any, Any] | None = None) -> Any:
        """A node that asks the model with the state's messages."""
        asked = model or self.model

        def node(state: Any) -> Any:
            return {"messages": [asked.invoke(state["messages"])]}

        async def anode(state: Any) -> Any:
            return {"messages": [await asked.ainvoke(state["messages"])]}

        return anode if self.asynchronous else node

    @property
    def config(self) -> dict[str, Any]:
        """The config of each run, unless the program gives another."""
        limited: dict[str, Any] = {"recursion_limit": 25}  # an agent's own limit is 9999
        return limited | ({"configurable": {"thread_id": self.thread}} if self.threaded else {})

    def run(
        self, graph: Runnable[Any, Any], input: Any, config: Any = None, **options: Any
    ) -> RunStep:
        """A step of the program: run the graph (or any runnable) in the mode of this kit.

        The program is sent the final state. Streamed graphs are read to their end in the modes
        ``messages``, ``updates`` and ``values``, subgraphs included. `options` are the graph's.
        """
        config = self.config if config is None else config
        if not self.streaming:
            go = graph.ainvoke if self.asynchronous else graph.invoke
            return lambda: go(input, config, **options)
        is_graph = isinstance(graph, PregelProtocol)
        if is_graph:
            modes = ["messages", "updates", "values"]
            options |= {"stream_mode": modes, "subgraphs": True}
        if self.asynchronous:
            return lambda: _alast(graph.astream(input, config, **options), is_graph)
        return lambda: _last(graph.stream(input, config, **options), is_graph)


def _last(parts: Iterator[Any], is_graph: bool) -> Any:
    return _state(list(parts), is_graph)


async def _alast(parts: AsyncIterator[Any], is_graph: bool) -> Any:
    return _state([part async for part in parts], is_graph)


def _state(parts: Sequence[Any], is_graph: bool) -> Any:
    if not is_graph:
        return parts
    values = [value for namespace, mode, value in parts if mode == "values" and not namespace]
    return values[-1] if values else None


def without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise ConfigError("a synchronous program waited for something")

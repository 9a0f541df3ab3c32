"""Several models in one graph; calls that cannot be trained say why."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import FakeListLLM

from tests.conformance.suite.cases.agents import alone
from tests.conformance.suite.cases.nesting import chain
from tests.conformance.suite.harness import Expect, Kit, Program, topology
from tests.conformance.suite.nodes import talk
from tests.conformance.suite.tools import look


@topology(
    "a foreign model beside ours",
    Expect("plan", "think", step=1, why="foreign"),
    Expect("work", "done", step=2),
    Expect("check", "fine", step=3, why="foreign"),
    remark="as a paid API would be: seen, judged, never trained",
)
def foreign_beside_ours(kit: Kit) -> Program:
    foreign = kit.foreign("think", "fine")
    graph = chain(plan=kit.node(foreign), work=kit.node(), check=kit.node(foreign)).compile()
    yield kit.run(graph, kit.ask("unused", "done"))


@topology(
    "a plain text model",
    Expect("answer", "text", step=1, why="foreign", task="node"),
    Expect("answer", "hello", step=1, task="node"),
    remark="LangChain's older `LLM` interface",
)
def text_model(kit: Kit) -> Program:
    text = FakeListLLM(responses=["text"])

    def node(state: Any) -> Any:
        yield text, "Once"
        return {"messages": [(yield kit.says("hello"))]}

    yield kit.run(alone(talk(kit, node)), {"messages": []})


@topology(
    "the base model beside a policy",
    Expect("work", "a draft", step=1),
    Expect("check", "fine", step=2, why="other_policy"),
)
def base_beside_policy(kit: Kit) -> Program:
    base = kit.chat(kit.base_model)
    graph = chain(work=kit.node(), check=kit.node(base)).compile()
    yield kit.run(graph, kit.ask("a draft", "fine"))


@topology(
    "no model of ours at all",
    Expect("answer", "hello", step=1, why="foreign"),
    remark="the run says that it has nothing to train",
)
def all_foreign(kit: Kit) -> Program:
    yield kit.run(alone(kit.node(kit.foreign("hello"))), kit.ask())


@topology(
    "samplings of all kinds",
    Expect("greedy", "one", step=1, why="greedy_decoding"),
    Expect("nucleus", "two", step=2),
    Expect("top", "three", step=3),
    Expect("forced", "look", step=4),
    Expect("warm", "four", step=5),
    remark="at temperature 0 nothing is drawn",
)
def samplings(kit: Kit) -> Program:
    forced = kit.model.bind_tools([look], tool_choice="any")
    graph = chain(
        greedy=kit.node(kit.chat(temperature=0)),
        nucleus=kit.node(kit.chat(top_p=0.9)),
        top=kit.node(kit.chat(extra_body={"top_k": 5})),
        forced=kit.node(forced),
        warm=kit.node(kit.chat(temperature=0.7)),
    ).compile()
    steps = ["one", "two", "three", {"call": "look", "args": {"what": "x"}}, "four"]
    yield kit.run(graph, kit.ask(*steps))


@topology(
    "a reply cut short",
    Expect("answer", "1", step=1),
    remark="`max_tokens`; what was sampled is trained",
)
def cut_short(kit: Kit) -> Program:
    said = "1, 2, 3"  # a digit is one token, whatever the tokenizer
    yield kit.run(alone(kit.node(kit.chat(max_tokens=1))), kit.ask(said))

"""Several models in one graph; calls that cannot be trained say why; decision models."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import (
    AutoModeMiddleware,
    ModelChoice,
    ModelFallbackMiddleware,
    ModelRefusalMiddleware,
    ModelRouterMiddleware,
)
from langchain_core.decisions import (
    BaseDecisionModel,
    ChoiceAnswer,
    ClassifierResponse,
    Noul,
    NoulAnswer,
)
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from tests.conformance.suite.cases.agents import alone
from tests.conformance.suite.cases.nesting import chain
from tests.conformance.suite.harness import Expect, Kit, Program, in_two_modes, topology
from tests.conformance.suite.nodes import talk
from tests.conformance.suite.tools import LOOK, look, run_agent


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
    "a foreign agent with a tool of ours",
    Expect("model", "ask", step=1, why="foreign"),
    Expect("tools", "blue", step=2),
    Expect("model", "it is blue", step=3, why="foreign"),
)
def foreign_agent(kit: Kit) -> Program:
    @tool
    def ask() -> str:
        """Ask."""
        return kit.model.invoke(kit.says("blue")).text

    call = {"name": "ask", "args": {}, "id": "1", "type": "tool_call"}
    foreign = kit.foreign(AIMessage("", tool_calls=[call]), "it is blue")
    yield kit.run(create_agent(foreign, [ask]), kit.ask())


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
    "two policies in one graph",
    Expect("work", "a draft", step=1),
    Expect("check", "look again", step=2, why="other_policy"),
    Expect("mend", "a better one", step=3),
    remark="each trains in a step of its own",
)
def two_policies(kit: Kit) -> Program:
    rival = kit.chat(kit.rival)
    graph = chain(work=kit.node(), check=kit.node(rival), mend=kit.node()).compile()
    yield kit.run(graph, kit.ask("a draft", "look again", "a better one"))


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


class Decider(BaseDecisionModel):
    """A decision model that asks a chat model: each answer is what that says."""

    model: str = "decider"
    chat: Any
    prompt: str

    @property
    def _provider(self) -> str:
        return "conformance"

    def _classify(self, state: Any, questions: dict[str, Any]) -> ClassifierResponse:
        return self._answered(self.chat.invoke(self.prompt).text, questions)

    async def _aclassify(self, state: Any, questions: dict[str, Any]) -> ClassifierResponse:
        return self._answered((await self.chat.ainvoke(self.prompt)).text, questions)

    def _answered(self, said: str, questions: dict[str, Any]) -> ClassifierResponse:
        answers: dict[str, Any] = {}
        for name, question in questions.items():
            if question.type == "noul":
                answers[name] = NoulAnswer(type="noul", noul=float(said))
            else:
                sure = {said: 1.0}
                answers[name] = ChoiceAnswer(
                    type="choice", choice=said, probabilities=sure, confidence=1.0
                )
        return ClassifierResponse(model=self.model, answers=answers)


@in_two_modes(
    "a model that is chosen for the task",
    Expect("ModelRouterMiddleware.before_agent", "rival", step=1),
    *Expect.turns("model", "look", "a door", first=2, why="other_policy"),
    remark="ModelRouterMiddleware; its decision model asks ours",
)
def model_router(kit: Kit) -> Program:
    router = ModelRouterMiddleware(
        choices={
            "ours": ModelChoice(kit.model, "Anything short."),
            "rival": ModelChoice(kit.chat(kit.rival), "Anything long."),
        },
        instructions="Which model suits the task?",
        classifier=Decider(chat=kit.model, prompt=kit.says("rival")),
    )
    yield run_agent(kit, LOOK, "a door", middleware=[router])


@in_two_modes(
    "a tool call that a decision blocks",
    *Expect.line(model="look", tools="0.9"),
    Expect("model", "a pity", step=3),
    remark="AutoModeMiddleware",
)
def blocked_tool(kit: Kit) -> Program:
    decider = Decider(chat=kit.model, prompt=kit.says("0.9"))
    guard = AutoModeMiddleware(tools=[look], classifier=decider)
    yield run_agent(kit, LOOK, "a pity", middleware=[guard])


@topology(
    "a decision in a node",
    *Expect.turns("answer", "0.2", "hello", apart=0, task="node"),
    remark="a decision model, asked as any Runnable",
)
def decision(kit: Kit) -> Program:
    decider = Decider(chat=kit.model, prompt=kit.says("0.2"))
    asked: Any = {"state": "Once", "questions": {"urgent": Noul(instructions="Is it urgent?")}}

    def node(state: Any) -> Any:
        yield decider, asked
        return {"messages": [(yield kit.says("hello"))]}

    yield kit.run(alone(talk(kit, node)), {"messages": []})


@in_two_modes(
    "a refusal, and another model",
    Expect("model", "", step=1, why="foreign", task="step"),
    Expect("model", "a door", step=1, task="step"),
    remark="ModelRefusalMiddleware within ModelFallbackMiddleware",
)
def refused(kit: Kit) -> Program:
    refusal = AIMessage([{"type": "refusal", "refusal": "I would rather not."}])
    middleware = [ModelFallbackMiddleware(kit.model), ModelRefusalMiddleware()]
    agent = create_agent(kit.foreign(refusal), [], middleware=middleware)
    yield kit.run(agent, kit.ask("a door"))

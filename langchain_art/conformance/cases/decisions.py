"""LangChain's decision models, and its middleware that asks one; a model that refuses."""

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
from langchain_core.messages import AIMessage

from langchain_art.conformance.cases.agents import alone
from langchain_art.conformance.harness import TWO_MODES, Expect, Kit, Program, topology
from langchain_art.conformance.tools import LOOK, look


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


@topology(
    "a model that is chosen for the task",
    Expect("ModelRouterMiddleware.before_agent", "rival", step=1),
    Expect("model", "look", step=2, why="other_policy"),
    Expect("model", "a door", step=4, why="other_policy"),
    modes=TWO_MODES,
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
    agent = create_agent(kit.model, [look], middleware=[router])
    yield kit.run(agent, kit.ask(LOOK, "a door"))


@topology(
    "a tool call that a decision blocks",
    Expect("model", "look", step=1),
    Expect("tools", "0.9", step=2),
    Expect("model", "a pity", step=3),
    modes=TWO_MODES,
    remark="AutoModeMiddleware",
)
def blocked_tool(kit: Kit) -> Program:
    decider = Decider(chat=kit.model, prompt=kit.says("0.9"))
    guard = AutoModeMiddleware(tools=[look], classifier=decider)
    yield kit.run(create_agent(kit.model, [look], middleware=[guard]), kit.ask(LOOK, "a pity"))


@topology(
    "a decision in a node",
    Expect("answer", "0.2", step=1, task="node"),
    Expect("answer", "hello", step=1, task="node"),
    remark="a decision model, asked as any Runnable",
)
def decision(kit: Kit) -> Program:
    decider = Decider(chat=kit.model, prompt=kit.says("0.2"))
    asked: Any = {"state": "Once", "questions": {"urgent": Noul(instructions="Is it urgent?")}}

    def node(state: dict[str, object]) -> object:
        decider.invoke(asked)
        return {"messages": [kit.model.invoke(kit.says("hello"))]}

    async def anode(state: dict[str, object]) -> object:
        await decider.ainvoke(asked)
        return {"messages": [await kit.model.ainvoke(kit.says("hello"))]}

    yield kit.run(alone(anode if kit.asynchronous else node), {"messages": []})


@topology(
    "a refusal, and another model",
    Expect("model", "", step=1, why="foreign", task="step"),
    Expect("model", "a door", step=1, task="step"),
    modes=TWO_MODES,
    remark="ModelRefusalMiddleware within ModelFallbackMiddleware",
)
def refused(kit: Kit) -> Program:
    refusal = AIMessage([{"type": "refusal", "refusal": "I would rather not."}])
    middleware = [ModelFallbackMiddleware(kit.model), ModelRefusalMiddleware()]
    agent = create_agent(kit.foreign(refusal), [], middleware=middleware)
    yield kit.run(agent, kit.ask("a door"))

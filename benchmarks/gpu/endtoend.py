"""A fit of a shape, end to end: ``python -m benchmarks.gpu.endtoend [--model NAME] [--small]``.

A scripted graph of several turns through `Trainer.fit`, on a server with vLLM beside the learner
(the embedded sampler on a CPU): random weights, and rewards that are a sum over the reply's bytes.
Of each step: seconds of rollouts, of the gradient, of `max_kl`, of saving, of the swap, and of all.

Writes ``out/bench/gpu/endtoend-NAME.json`` after each step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from benchmarks.gpu.learner import conditions, console, keep
from benchmarks.gpu.parts import arguments
from benchmarks.gpu.server import PLACES, save_model
from benchmarks.learning.methods import LORA
from langchain_art import ChatART, LocalServer, Run, Trainer, capture
from langchain_art.training.records import StepRecord

POLICY = "bench"
OPTIONS: dict[str, dict[str, Any]] = {
    "python": {"type": Path, "default": Path(sys.executable), "help": "that has vLLM"},
    "place": {"choices": list(PLACES), "default": "vLLM beside the learner"},
    "steps": {"type": int, "default": 2},
    "scenarios": {"type": int, "default": 16, "help": "of a step, of 8 runs each"},
    "turns": {"type": int, "default": 4, "help": "calls of a run"},
    "tokens": {"type": int, "default": 200, "help": "most of a reply"},
}


def graph_of(model: ChatART, turns: int, heard: int) -> Any:
    """An agent that is answered `heard` words after each of its turns."""

    async def agent(state: MessagesState) -> MessagesState:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def answered(state: MessagesState) -> MessagesState:
        return {"messages": [HumanMessage("mail " * heard)]}

    def goes_on(state: MessagesState) -> str:
        return END if len(state["messages"]) >= 2 * turns else "answered"

    graph = StateGraph(MessagesState)
    graph.add_node(agent)
    graph.add_node(answered)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", goes_on)
    graph.add_edge("answered", "agent")
    return graph.compile()


def seconds_of(record: StepRecord) -> dict[str, float]:
    """A step's seconds, by what they went to."""
    metrics = record.metrics
    apart = {name: metrics.get(f"{name}_seconds", 0.0) for name in ("kl", "save", "swap")}
    return {
        "rollout": record.seconds["rollout"],
        "gradient": metrics["seconds"] - apart["kl"] - apart["save"],
        **apart,
        "all": record.seconds["total"],
    }


def main() -> None:
    given = arguments(__doc__, "endtoend", **OPTIONS)
    asked, small = given.options, given.small
    place = "embedded sampler" if small else asked.place
    scenarios, turns, tokens = (2, 2, 8) if small else (asked.scenarios, asked.turns, asked.tokens)
    size, prompt, heard = (2, 20, 5) if small else (8, 900, 100)
    steps: list[dict[str, Any]] = []
    found = conditions("endtoend", given.name, given.device)
    found |= {"place": place, "scenarios": scenarios, "runs": size, "turns": turns, "steps": steps}
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        folder = Path(temporary)
        save_model(given.name, folder / "model", given.device)
        toml = folder / "server.toml"
        toml.write_text(PLACES[place].format(python=asked.python))
        begun = time.monotonic()
        options = ["--config", str(toml)]
        with LocalServer(folder / "model", data_dir=folder / "data", options=options) as server:
            found["start_seconds"] = time.monotonic() - begun
            keep(given.path, found)
            model = ChatART(model=POLICY, base_url=server.base_url, max_tokens=tokens)
            graph = graph_of(model, turns, heard)

            async def rollout(scenario: int) -> Run:
                async with capture(scenario=str(scenario)) as run:
                    asked_for = f"{scenario}: " + "mail " * prompt
                    state = await graph.ainvoke({"messages": [HumanMessage(asked_for)]})
                    run.reward = sum(state["messages"][-1].text.encode()) % 97 / 97
                return run

            def note(record: StepRecord) -> None:
                seconds = seconds_of(record)
                steps.append({"seconds": seconds, "tokens": record.tokens, "runs": record.runs})
                keep(given.path, found)
                console.print(f"step {record.step}", steps[-1])

            trainer = Trainer(
                model, group_size=size, groups_per_step=scenarios, out_dir=folder / "fit", lora=LORA
            )
            count = 1 if small else asked.steps
            trainer.fit_sync(rollout, list(range(scenarios)), steps=count, on_step=note)


if __name__ == "__main__":
    main()

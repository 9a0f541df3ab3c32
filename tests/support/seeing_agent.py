"""An agent that answers by what is in a picture, and its fit on a small random model.

    .venv/bin/python -m tests.support.seeing_agent [FAMILY]

Its pictures are of one colour, drawn at random, with noise. It is to say whether they are warm
(more red than blue) or cold, as JSON of a schema; held out are pictures of other colours. A reply
that does not depend on the picture is right half of the time.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.graph import END, START, StateGraph
from PIL import Image
from rich.console import Console

from langchain_art import ChatART, LocalServer, TrainConfig, Trainer, capture
from langchain_art.tracing.run import Run
from langchain_art.training.records import EvalResult, FitResult
from tests.support.vision_models import save_vision_model

#: Held-out pictures, and groups of eight that a step learns from.
HELD_OUT, GROUPS = 64, 4
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "Seen",
        "schema": {
            "type": "object",
            "properties": {"is": {"enum": ["warm", "cold"]}},
            "required": ["is"],
            "additionalProperties": False,
        },
    },
}


class State(TypedDict, total=False):
    picture: bytes
    message: AnyMessage


def picture(seed: int) -> bytes:
    """A picture; the same for the same seed."""
    draw = random.Random(seed)
    strong, weak, green = draw.randint(140, 255), draw.randint(0, 115), draw.randint(0, 255)
    red, blue = (strong, weak) if seed % 2 else (weak, strong)
    pixels = [
        min(255, max(0, one + draw.randint(-20, 20)))
        for _ in range(28 * 28)
        for one in (red, green, blue)
    ]
    file = io.BytesIO()
    Image.frombytes("RGB", (28, 28), bytes(pixels)).save(file, "PNG")
    return file.getvalue()


class Agent:
    """A graph of one node, its trainer and its scenarios, which are seeds of pictures."""

    def __init__(self, base_url: str, folder: Path, seed: int) -> None:
        self.model = ChatART(model="seer", base_url=base_url, max_tokens=24).bind(
            response_format=SCHEMA
        )
        graph = StateGraph(State)
        graph.add_node("look", self._look)
        graph.add_edge(START, "look")
        graph.add_edge("look", END)
        self.graph = graph.compile()
        self.trainer = Trainer(
            ChatART(model="seer", base_url=base_url),
            config=TrainConfig(learning_rate=1e-2),
            group_size=8,
            groups_per_step=GROUPS,
            seed=seed,
            out_dir=folder,
            console=Console(file=io.StringIO()),
        )

    async def _look(self, state: State) -> State:
        data = base64.b64encode(state["picture"]).decode()
        content: list[Any] = [
            {"type": "text", "text": "warm or cold?"},
            {"type": "image", "base64": data, "mime_type": "image/png"},
        ]
        return {"message": await self.model.ainvoke([HumanMessage(content)])}

    async def rollout(self, scenario: int) -> Run:
        async with capture(scenario=f"picture-{scenario}") as run:
            found = await self.graph.ainvoke({"picture": picture(scenario)})
            said = json.loads(str(found["message"].text))["is"]
            run.reward = float(said == ("warm" if scenario % 2 else "cold"))
        return run

    def held_out(self, count: int = HELD_OUT) -> EvalResult:
        """The share of right answers on pictures that are not trained."""
        return self.trainer.evaluate_sync(self.rollout, range(10**6, 10**6 + count))

    def fit(self, steps: int) -> FitResult:
        """Train on pictures that no evaluation has."""
        return self.trainer.fit_sync(self.rollout, range(steps * GROUPS), steps=steps)


def learn(seed: int, steps: int, family: str = "LLaVA") -> tuple[EvalResult, EvalResult]:
    """A fit of a family's model on a server of its own: held out before and after."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_vision_model(folder / "model", family)
        options = ("--device", "cpu")
        with LocalServer(
            model, policies=["seer"], data_dir=folder / "data", options=options
        ) as server:
            agent = Agent(server.base_url, folder / "fit", seed)
            before = agent.held_out()
            agent.fit(steps)
            return before, agent.held_out()


def main(family: str = "LLaVA", seeds: Sequence[int] = range(5), steps: int = 24) -> None:
    """Print a line for each seed."""
    for seed in seeds:
        before, after = learn(seed, steps, family)
        shown = (f"{one.mean:.3f} ± {one.ci95:.3f}" for one in (before, after))
        print(f"seed {seed}: {' → '.join(shown)} (n={HELD_OUT}, {steps} steps)", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])

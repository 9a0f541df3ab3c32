"""A graph of two nodes of which one is noise: what each node's tokens do to the policy's gradient.

The figures stand in ``docs/credit.md``, which this holds to what is measured here. The learner is
the real one, in float64; replies are sampled from it, rewards and advantages go through `Batch`.
"""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from langchain_art.wire import TrainConfig, TrainRequest, Trajectory, Turn
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.jobs.batch_builder import Batch
from tests.support.call_records import record
from tests.support.learner_cases import fresh, quiet, shake

PAGE = Path(__file__).parents[3] / "docs" / "credit.md"
GROUPS, RUNS, TOKENS = 8, 8, 6
PROMPTS = {"writer": [5, 6, 7], "noise": [5, 8, 9]}

MEAN = {"advantage": "mean"}
#: Row of the page -> config, and the rewards of a run: (the run's, the writer's, noise's).
#: `r` is what the writer earned, `e` what a judge makes of noise: a hundredth of its spread.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "`run`, the run's reward": (MEAN, lambda r, e: (r, None, None)),
    "`node`, the run's reward": (MEAN | {"credit": "node"}, lambda r, e: (r, None, None)),
    "`turn`, a reward for each node": (MEAN | {"credit": "turn"}, lambda r, e: (None, r, 0.0)),
    "`node`, a reward for each node": (MEAN | {"credit": "node"}, lambda r, e: (None, r, 0.0)),
    "`node`, and noise judged within ±0.01": (MEAN | {"credit": "node"}, lambda r, e: (None, r, e)),
    "the same, `standardized`": (
        {"credit": "node", "advantage": "standardized"},
        lambda r, e: (None, r, e),
    ),
}


class Graph:
    """Runs of the graph, sampled once: a writer whose first token earns something, then noise."""

    def __init__(self, core: LearnerCore, adapter: Path) -> None:
        self.core = core
        base = AutoModelForCausalLM.from_pretrained(core.name, dtype=torch.float64)
        self.sampler = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
        core._hold(adapter)
        said = {node: self._sampled(prompt, seed) for seed, (node, prompt) in enumerate(NODES)}
        self.rewards = [float(ids[0] % 3 == 0) for ids in said["writer"]]
        rows = {
            node: [
                Row([*prompt, *ids], [0] * 3 + [1] * TOKENS, [0.0] * 9, [0.0] * 9)
                for ids in said[node]
            ]
            for node, prompt in NODES
        }
        logprobs = {node: core.logprobs(adapter, rows[node]) for node in rows}
        self.records = {
            f"{node}-{i}": record(
                f"{node}-{i}", prompt, said[node][i], logprobs=logprobs[node][i][3:].tolist()
            )
            for node, prompt in NODES
            for i in range(GROUPS * RUNS)
        }

    def _sampled(self, prompt: list[int], seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        ids_BT = torch.tensor([prompt] * (GROUPS * RUNS))
        with torch.no_grad():
            for _ in range(TOKENS):
                logits_BV = self.sampler(input_ids=ids_BT).logits[:, -1]
                chosen_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
                ids_BT = torch.cat([ids_BT, chosen_B1], dim=1)
        return [row[len(prompt) :] for row in ids_BT.tolist()]

    def batch(self, config: TrainConfig, rewards: Any) -> Batch:
        rng, ids = random.Random(1), [f"r-{i}" for i in range(GROUPS * RUNS)]
        runs = [
            self._run(i, *rewards(earned, rng.uniform(-0.01, 0.01)))
            for i, earned in enumerate(self.rewards)
        ]
        groups = [tuple(ids[g * RUNS : (g + 1) * RUNS]) for g in range(GROUPS)]
        made = Batch(TrainRequest(policy="p", groups=tuple(groups), config=config), 0)
        for g in range(GROUPS):
            made.add_group(runs[g * RUNS : (g + 1) * RUNS], self.records)
        made.settle()
        return made

    @staticmethod
    def _run(i: int, whole: float | None, writer: float | None, noise: float | None) -> Trajectory:
        turns = [
            Turn(call_id=f"{node}-{i}", node=node, model="p@0", reward=reward)
            for node, reward in (("writer", writer), ("noise", noise))
        ]
        return Trajectory(id=f"r-{i}", turns=tuple(turns), reward=whole)

    def norms(self, config: TrainConfig, rewards: Any) -> dict[str, float]:
        """The norm of the gradient that falls to each node's tokens in one and the same step."""
        rows = self.batch(config, rewards).rows
        return {node: self._norm(rows, prompt, config) for node, prompt in NODES}

    def _norm(self, rows: list[Row], prompt: list[int], config: TrainConfig) -> float:
        own = [
            row if row.token_ids[:3] == prompt else replace(row, weights=[0.0] * len(row.mask))
            for row in rows
        ]
        self.core.accumulate(self.core.batch(own, config), quiet)
        squares = 0.0
        for parameter in self.core.parameters.values():
            if parameter.grad is not None:
                squares += float(parameter.grad.double().square().sum())
                parameter.grad = None
        return squares**0.5


NODES = list(PROMPTS.items())


@pytest.fixture(scope="module")
def measured(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, float]]:
    core = LearnerCore(tiny, dtype="float64")
    graph = Graph(core, shake(fresh(core, tmp_path_factory.mktemp("noise"))))
    found: dict[str, tuple[float, float]] = {}
    for name, (fields, rewards) in CASES.items():
        norms = graph.norms(TrainConfig(**fields), rewards)
        found[name] = norms["writer"], norms["noise"]
    return found


def ratios(measured: dict[str, tuple[float, float]]) -> list[float]:
    return [noise / writer for writer, noise in measured.values()]


def test_a_node_that_is_noise_has_a_gradient_near_zero(
    measured: dict[str, tuple[float, float]],
) -> None:
    by_run, by_node_alone, by_turn, by_node, jittered, standardized = ratios(measured)
    assert by_run > 0.3 and by_turn > 0.3
    assert by_node_alone == pytest.approx(by_run)  # both nodes are in every run: nothing differs
    assert by_node == 0.0
    assert 0.0 < jittered < 0.05
    assert standardized > 0.3  # what is nearly flat is blown up to the size of what is not
    signals = [writer for writer, _ in list(measured.values())[:5]]
    assert min(signals) > 0 and by_run * signals[0] > 20 * jittered * signals[4]


def test_the_page_says_what_is_measured(measured: dict[str, tuple[float, float]]) -> None:
    shown = {
        name.strip(): (float(writer), float(noise))
        for name, writer, noise in re.findall(
            r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE
        )
    }
    assert list(shown) == list(measured)
    for name, values in measured.items():
        assert shown[name] == pytest.approx(values, abs=6e-4), (name, values)

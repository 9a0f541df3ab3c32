"""What asking our way is worth, against ART's released RULER: the same groups, the same judge.

The judge is simulated and its faults are known (`judging.simulated` says what it models and what it
does not). It stands behind OpenAI's API on loopback; ART (openpipe-art 0.5.23, in an environment of
its own) asks it through litellm, we through `ChatOpenAI`, each with the prompt that it really
sends. Tokens are counted by o200k_base over all messages and the reply, by the judge itself.

``rank_error``: share of the pairs of a group's runs of different quality that the scores put in the
wrong order, ties counting half. ``rank_error_ratio``: ours with two passes (the default) over
ART's, under noise 0.05 and a bias of 0.2 that falls evenly from the first to the last place;
``…_four`` with four passes; ``…_noisy``, ``…_quiet``: noise 0.1, 0.02; ``…_first``: the bias is the
first place's alone. ``tokens_ratio_two``, ``…_four``: what they cost.

``judge_tokens_ratio``: our tokens with one pass over ART's, with no bias, where both rank alike:
``one_pass_error_ratio`` is to be about 1. The rest of a group's figures are these ratios' parts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from langchain_openai import ChatOpenAI

from benchmarks.judging.simulated import Faults, SimulatedJudge
from benchmarks.judging.workload import RUNS, TOOLS, Case, case
from benchmarks.learning.children import ART, art_python
from langchain_art import RulerEvaluator
from langchain_art.evaluators.ruler.judge_model import Spent

CASES = 120
#: Of the faults beside the main ones.
FEWER = 60
FAULTS = {
    "main": Faults(noise=0.05, bias=0.2),
    "noisy": Faults(noise=0.1, bias=0.2),
    "quiet": Faults(noise=0.02, bias=0.2),
    "first": Faults(noise=0.05, bias=0.2, shape="first"),
    "unbiased": Faults(noise=0.05, bias=0.0),
}
CHILD = Path(__file__).parent / "judging" / "child_art.py"


def rank_error(cases: Sequence[Case], scores: Sequence[Sequence[float]]) -> float:
    """Share of the pairs of different quality in the wrong order; a tie is half a mistake."""
    wrong, pairs = 0.0, 0
    for one, found in zip(cases, scores, strict=True):
        for a, b in combinations(range(RUNS), 2):
            better = one.qualities[a] - one.qualities[b]
            if abs(better) < 1e-9:
                continue
            pairs += 1
            given = (found[a] - found[b]) * better
            wrong += 1.0 if given < 0 else 0.5 if given == 0 else 0.0
    return wrong / pairs


async def ours(
    cases: Sequence[Case], base_url: str, model: str, *, passes: int
) -> tuple[list[list[float]], Spent]:
    """Rewards, case by case, and what they took."""
    judge = ChatOpenAI(model=model, base_url=base_url, api_key="none", max_retries=0)
    evaluator = RulerEvaluator(judge, passes=passes, attempts=1)
    scored = await evaluator.abatch([one.group for one in cases], {"max_concurrency": 4})
    rewards = [[float(run.reward or 0.0) for run in group.trajectories] for group in scored]
    assert evaluator.spent.groups == len(cases), evaluator.spent
    assert all(run.reward is not None for group in scored for run in group.trajectories)
    return rewards, evaluator.spent


def art(cases: Sequence[Case], base_url: str, model: str) -> list[list[float]]:
    """Rewards, case by case."""
    told = [{"runs": one.messages, "tools": TOOLS} for one in cases]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps(told))
        argv: list[Any] = [art_python(), CHILD, path, base_url, model]
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "WANDB_MODE": "disabled"}
        done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | quiet)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line)["rewards"] for line in lines]


def run() -> tuple[dict[str, float], dict[str, Any]]:
    home = art_python().parent.parent
    # litellm brings the file that tiktoken would download.
    (vocabularies,) = home.glob("lib/python*/site-packages/litellm/litellm_core_utils/tokenizers")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(vocabularies)
    cases = [case(number) for number in range(CASES)]
    with SimulatedJudge({one.number: one.fact for one in cases}, FAULTS) as judge:
        figures = measured(cases, judge)
    about = {"cases": CASES, "cases_of_other_faults": FEWER, "runs_per_case": RUNS, "art": ART[-1]}
    return figures, about | {"judge": "simulated"}


def measured(cases: Sequence[Case], judge: SimulatedJudge) -> dict[str, float]:
    theirs, art_tokens = {}, {}
    for model in FAULTS:
        some = cases if model in ("main", "unbiased") else cases[:FEWER]
        before = judge.tokens
        theirs[model] = rank_error(some, art(some, judge.base_url, model))
        art_tokens[model] = (judge.tokens - before) / len(some)

    def over_art(model: str, passes: int) -> tuple[float, float]:
        """Rank error and tokens of ours, each over ART's."""
        some = cases if model in ("main", "unbiased") else cases[:FEWER]
        found, spent = asyncio.run(ours(some, judge.base_url, model, passes=passes))
        tokens = (spent.input_tokens + spent.output_tokens) / len(some)
        return rank_error(some, found) / theirs[model], tokens / art_tokens[model]

    error, tokens = over_art("main", 2)
    error_four, tokens_four = over_art("main", 4)
    error_alone, tokens_alone = over_art("unbiased", 1)
    figures = {
        "rank_error_ratio": error,
        "tokens_ratio_two": tokens,
        "rank_error_ratio_four": error_four,
        "tokens_ratio_four": tokens_four,
        "judge_tokens_ratio": tokens_alone,
        "one_pass_error_ratio": error_alone,
    }
    for model in ("noisy", "quiet", "first", "unbiased"):
        figures[f"rank_error_ratio_{model}"], _ = over_art(model, 2)
    figures |= {f"rank_error_art_{model}": value for model, value in theirs.items()}
    return figures | {"tokens_art": art_tokens["main"]}

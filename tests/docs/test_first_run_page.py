"""The lines that docs/first-run.md explains are lines that a fit prints."""

import io
import re

from rich.console import Console

from langchain_art.training.progress import Display
from langchain_art.training.records import EvalResult, StepRecord
from langchain_art.wire import NodeReport, TrainResult
from tests.support.pages import REPO

PAGE = REPO / "docs" / "first-run.md"


def printed() -> str:
    node = NodeReport(calls=9, tokens=812, advantage_mean=0.0, advantage_abs=0.43, excluded={})
    metrics = {"loss": -0.001, "grad_norm": 0.3, "logprob_gap_mean": 1e-6}
    result = TrainResult(
        policy="my-agent",
        version=3,
        metrics=metrics,
        excluded={"groups.zero_variance": 9},
        nodes={"writer": node},
    )
    record = StepRecord(
        step=3,
        results={"my-agent": result},
        reward_mean=0.412,
        reward_std=0.492,
        groups=16,
        failed=2,
        retried=3,
        seconds={"rollout": 2.1, "train": 0.9, "total": 3.0},
    )
    held_out = EvalResult(step=10, versions=("my-agent@10",), mean=0.625, ci95=0.067, n=200)
    console = Console(file=io.StringIO(), width=200)
    display = Display(console)
    display.step(record, 30, first=False)
    display.eval(held_out)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_what_the_display_says_is_what_the_page_explains() -> None:
    table = PAGE.read_text().partition("{ #display }")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(shown) > 8
    said = printed()
    for words in shown:
        plain = " ".join(words.replace("\\|", "|").split())
        assert "…" in plain or plain in said, plain

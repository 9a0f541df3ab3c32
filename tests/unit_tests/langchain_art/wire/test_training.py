"""Every reason that the server can send has a meaning, and the sampling ones say what to do."""

from langchain_art.credit.batch_plan import SAMPLING
from langchain_art.training.records import StepRecord
from langchain_art.training.report import nothing_trained
from langchain_art.wire import NodeReport, TrainResult
from langchain_art.wire.training import meaning
from langchain_art_server.backends.base import ChatRequest, Sampling
from langchain_art_server.backends.chat.output_processor import why_excluded
from tests.support.exclusion_reasons import sent_reasons
from tests.support.live_server import REPO

UNKNOWN = meaning("calls.no_such_reason")


def test_every_reason_has_a_meaning() -> None:
    """Not a test for each: the sources would be read where tests are collected, by each process."""
    assert {"groups.zero_variance", "runs.unscored", "calls.superseded_unchosen"} <= sent_reasons()
    table = (REPO / "docs/troubleshooting.md").read_text().partition("What was excluded")[2]
    for reason in sorted(sent_reasons()):
        assert meaning(reason) != UNKNOWN, reason
        row = "calls.superseded_…" if reason.startswith("calls.superseded") else reason
        assert f"`{row}`" in table


def test_the_reasons_of_sampling_are_those_of_the_sampler() -> None:
    asked = {
        why_excluded(
            ChatRequest(id="", messages=[], sampling=Sampling(**odd)),
            problem,
            grammar=False,
            logprobs=[0.0],
        )
        for odd, problem in (
            ({"temperature": 0.0}, ""),
            ({"top_k": 1}, ""),
            ({"top_k": 3}, "it is not known"),
            ({}, "it is not known"),
        )
    }
    words = {str(one).partition(":")[0].replace(" ", "_") for one in asked}
    assert words == SAMPLING


def test_a_call_at_temperature_0_is_told_what_to_do() -> None:
    excluded = {"groups.zero_variance": 2, "calls.greedy_decoding": 8}
    node = NodeReport(calls=0, tokens=0, advantage_mean=0, advantage_abs=0, excluded={})
    result = TrainResult(policy="p", version=0, metrics={}, excluded=excluded, nodes={"n": node})
    record = StepRecord(step=1, results={"p": result}, reward_mean=0, reward_std=0, groups=2)
    assert any(
        "8 calls.greedy_decoding" in line and "set temperature=1" in line
        for line in nothing_trained(record)
    )

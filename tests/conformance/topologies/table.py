"""The table in ``docs/topologies.md``: what the suite shows of each topology."""

from __future__ import annotations

from collections.abc import Iterable

from tests.conformance.suite.harness import TOPOLOGIES, Topology
from tests.support.live_server import REPO

PAGE = REPO / "docs" / "topologies.md"
COLUMNS = ("captured", "exact tokens", "each token once", "judged", "trained")
REASONS = {
    "foreign": "of another provider's model",
    "other_policy": "of another policy, or of the base model",
    "greedy_decoding": "greedy",
    "superseded_error": "of an attempt that failed",
    "superseded_retried": "of an attempt that was made again",
    "superseded_interrupted": "of a node that was run again after an interrupt",
    "superseded_unchosen": "that the node did not return",
    "lost": "whose tokens are not on record",
}


def page() -> str:
    """The page with its table anew; what stands above it stays."""
    lines = ["| topology | modes | " + " | ".join(COLUMNS) + " | remarks |"]
    lines.append("|---|---|" + "---|" * (len(COLUMNS) + 1))
    lines += [_line(case) for case in sorted(TOPOLOGIES.values(), key=_place)]
    return PAGE.read_text().partition(lines[0])[0] + "\n".join(lines) + "\n"


def _place(case: Topology) -> tuple[str, int]:
    return case.program.__module__, list(TOPOLOGIES).index(case.name)


def _line(case: Topology) -> str:
    calls = len(case.expects)
    words = dict.fromkeys(COLUMNS, "yes")
    words["captured"] = f"{calls} call{'s' if calls > 1 else ''}"
    words["trained"] = f"{case.trained} of {calls}" if case.excluded else "all"
    return f"| {case.name} | {len(case.modes)} | {' | '.join(words.values())} | {_remarks(case)} |"


def _remarks(case: Topology) -> str:
    left = [f"{count} {REASONS[why]}" for why, count in case.excluded.items()]
    said: Iterable[str] = [f"not trained: {', '.join(left)}"] if left else []
    return "; ".join([*([case.remark] if case.remark else []), *said])

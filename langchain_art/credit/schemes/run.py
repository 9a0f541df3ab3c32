"""``run``: a run's reward, its calls' included, against the other runs'; all calls get the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from langchain_art.credit.candidates import CandidateRun
from langchain_art.credit.pools import Pool, whole_runs
from langchain_art.wire import SimpleCredit


def pools(
    runs: Sequence[CandidateRun], credit: SimpleCredit, compared: Mapping[str, Sequence[float]]
) -> list[tuple[Pool, float]]:
    """One pool of all runs."""
    return [(whole_runs(runs), 1.0)]

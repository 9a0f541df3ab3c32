"""``run``: a run's reward, its calls' included, against the other runs'; all calls get the same."""

from __future__ import annotations

from langchain_art.credit.candidates import Compared, Runs, WeightedPools, whole_runs
from langchain_art.wire import SimpleCredit


def pools(runs: Runs, credit: SimpleCredit, compared: Compared) -> WeightedPools:
    """One pool of all runs."""
    return [(whole_runs(runs), 1.0)]

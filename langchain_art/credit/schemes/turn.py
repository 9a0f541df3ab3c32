"""``turn``: a call's return (`returns`) against the mean of the runs' mean returns.

MT-GRPO (arXiv 2505.11821) and GTPO (2511.14846) have such returns; here a long run weighs no more.
"""

from __future__ import annotations

from langchain_art.credit.candidates import Compared, Pool, Runs, WeightedPools, returns
from langchain_art.wire import TurnCredit


def pools(runs: Runs, credit: TurnCredit, compared: Compared) -> WeightedPools:
    """One pool of all runs, each with the returns of its steps."""
    units = {i: returns(run, credit.discount) for i, run in enumerate(runs)}
    pool: Pool = {i: [(v, [(i, k)]) for k, v in unit.items()] for i, unit in units.items() if unit}
    return [(pool, 1.0)]

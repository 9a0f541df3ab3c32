"""``anchor``: runs are compared, and calls that were asked in the same state.

``A_run + weight * A_state``, the latter a call's return against those of all calls of the group
that were asked in the same state. GiGPO (arXiv 2505.10978).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from langchain_art.credit.candidates import Compared, Pool, Runs, WeightedPools, returns, whole_runs
from langchain_art.wire import AnchorCredit


def pools(runs: Runs, credit: AnchorCredit, compared: Compared) -> WeightedPools:
    """One pool of all runs, and one for each state in which several calls were asked."""
    states: defaultdict[Hashable, Pool] = defaultdict(dict)
    for i, run in enumerate(runs):
        for k, value in returns(run, credit.discount).items():
            if (prompt := run.calls[k].prompt) is not None:
                states[tuple(prompt)][i, k] = [(value, [(i, k)])]  # here the unit is the call
    several = [pool for pool in states.values() if len(pool) > 1 and len(runs) > 1]
    return [(whole_runs(runs), 1.0), *((pool, credit.weight) for pool in several)]

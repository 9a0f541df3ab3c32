"""``call``: runs are compared by their own rewards, and calls of one node by theirs.

``A_run + A_call``, the one a run's own reward against the other runs', the other a call's reward
against those of all rewarded calls of its node. Runs and calls without a reward are compared with
nothing: None is not 0.
"""

from __future__ import annotations

from collections import defaultdict

from langchain_art.credit.candidates import Compared, Pool, Runs, WeightedPools, all_steps, steps
from langchain_art.wire import SimpleCredit


def pools(runs: Runs, credit: SimpleCredit, compared: Compared) -> WeightedPools:
    """One pool of the rewarded runs, and one of the rewarded calls of each node."""
    whole: Pool = {
        i: [(run.reward, steps(runs, i))] for i, run in enumerate(runs) if run.reward is not None
    }
    by_node: defaultdict[str, Pool] = defaultdict(dict)
    for i, k in all_steps(runs):
        call = runs[i].calls[k]
        if call.reward is not None:
            by_node[call.node][i, k] = [(call.reward, [(i, k)])]  # here the unit is the call
    for node, values in compared.items():
        pool = by_node[node] if node else whole
        pool |= {("compared", index): [(value, [])] for index, value in enumerate(values)}
    return [(pool, 1.0) for pool in (whole, *by_node.values())]

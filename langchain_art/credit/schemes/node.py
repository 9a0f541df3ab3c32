"""``node``: each node's runs are compared.

For each node, the run's own reward and those of the node's calls in it, against the other runs with
that node; the node's calls get the same. Dr. MAS (arXiv 2602.08847), which has no rewards of calls.
"""

from __future__ import annotations

import math
from collections import defaultdict

from langchain_art.credit.candidates import Compared, Place, Pool, Runs, WeightedPools, steps
from langchain_art.wire import SimpleCredit


def pools(runs: Runs, credit: SimpleCredit, compared: Compared) -> WeightedPools:
    """One pool for each node."""
    found: defaultdict[str, Pool] = defaultdict(dict)
    for i, run in enumerate(runs):
        places: defaultdict[str, list[Place]] = defaultdict(list)
        for place in steps(runs, i):
            places[run.calls[place[1]].node].append(place)
        for node, own in places.items():
            rewards = (run.calls[k].reward or 0.0 for _, k in own)
            found[node][i] = [(math.fsum([run.reward or 0.0, *rewards]), own)]
    return [(pool, 1.0) for pool in found.values()]

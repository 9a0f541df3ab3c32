"""The advantages of runs that were branched (`Trainer(forks=)`), of one group."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from langchain_art.rollout.forks import FORK, ForkOf
from langchain_art.wire import Trajectory, TrajectoryGroup


def fork_advantages(group: TrajectoryGroup) -> list[list[float | None]]:
    """For each run of a group, the advantages of its calls.

    A run and its continuations are a tree: each of them is a leaf ``l`` with a reward ``r_l``, and
    calls that were made before a branch have several leaves below them. With ``T(l)`` the leaves of
    a leaf's tree, and ``G`` those of all trees of the group::

        A_l = (r_l - mean_{j in T(l)} r_j) + (r_l - mean_{j in G} r_j)
        A_c = mean_{l below c} A_l                                  for each call c

    which is the sum of the advantages within a tree and between trees of Tree-GRPO (arXiv
    2509.21240, section 3.3), without the division by the standard deviation, as in
    ``advantage="mean"``. There each leaf trains the calls above it; here each call is trained once,
    with the mean over its leaves. Before the first branch the first part is then 0: what is left is
    how the tree fared beside the others. Where a tree has one branch only, the difference of two of
    its leaves' `A` is twice that of their rewards, and due to what was decided there and after.

    A leaf is worth its `Trajectory.total_return`; one without is left out. A call without a leaf
    that has one gets None.
    """
    runs = group.trajectories
    worth = {run.id: value for run in runs if (value := run.total_return) is not None}
    about = {run.id: fork_of(run) for run in runs}
    trees: defaultdict[str, list[str]] = defaultdict(list)
    for run in runs:
        branch = about[run.id]
        if run.id in worth:
            trees[run.id if branch is None else branch.of].append(run.id)
    among_all = statistics.fmean(worth.values()) if worth else 0.0
    of_leaf: dict[str, float] = {}
    for leaves in trees.values():
        among_tree = statistics.fmean(worth[leaf] for leaf in leaves)
        for leaf in leaves:
            of_leaf[leaf] = (worth[leaf] - among_tree) + (worth[leaf] - among_all)
    given: list[list[float | None]] = []
    for run in runs:
        branches = [(leaf, at.turns) for leaf, at in about.items() if at and at.of == run.id]
        below = [
            [run.id, *(leaf for leaf, turns in branches if k < turns)]
            for k in range(len(run.turns))
        ]
        given.append([_mean([of_leaf[one] for one in some if one in of_leaf]) for some in below])
    return given


def fork_of(run: Trajectory) -> ForkOf | None:
    """What a run continues; None if it began at its graph's start."""
    found = run.metadata.get(FORK)
    return None if found is None else ForkOf.model_validate(found)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

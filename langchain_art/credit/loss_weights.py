"""The weight of each trained token in the loss of a step. No torch.

The loss is ``Σ_t weight_t loss_t``. The weights are computed once for the whole batch, so that the
split into micro-batches, rows and shared prefixes does not change the gradient (a mean of
micro-batches' means does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from langchain_art.wire import Aggregation, ConstantAggregation


def call_weights(
    calls: Sequence[tuple[Hashable, int]], aggregation: Aggregation = "token"
) -> list[float]:
    """The weight of each token of each call.

    - ``token``: 1/N, all trained tokens weigh the same: DAPO (arXiv 2503.14476, eq. 8).
    - ``sequence``: the mean of each call's tokens, then of calls: GRPO (arXiv 2402.03300).
    - ``run``: the mean of each run's tokens, then of runs: a run weighs the same however many
      calls, rows and tokens it has.
    - ``constant``: 1/constant: Dr. GRPO (arXiv 2503.20783). Its gradient has the direction of
      ``token``'s; its norm grows with the batch.

    Example, a run of calls of 1 and 3 tokens and a run with one call of 4 tokens::

        call_weights([("a", 1), ("a", 3), ("b", 4)], "token")     # [1/8, 1/8, 1/8]
        call_weights([("a", 1), ("a", 3), ("b", 4)], "sequence")  # [1/3, 1/9, 1/12]
        call_weights([("a", 1), ("a", 3), ("b", 4)], "run")       # [1/8, 1/8, 1/8]

    Args:
        calls: for each trained call of the batch, its run and how many of its tokens are trained.
        aggregation: see above; default ``token``.

    Returns:
        One weight per call. Times the calls' tokens they sum to 1 (but for ``constant``).
    """
    if isinstance(aggregation, ConstantAggregation):
        return [1.0 / aggregation.value for _ in calls]
    if aggregation == "token":
        total = sum(tokens for _, tokens in calls)
        return [1.0 / total for _ in calls]
    if aggregation == "sequence":
        return [1.0 / (tokens * len(calls)) for _, tokens in calls]
    lengths: Counter[Hashable] = Counter()
    for run, tokens in calls:
        lengths[run] += tokens
    return [1.0 / (lengths[run] * len(lengths)) for run, _ in calls]

"""Checks of `Trainer(trainable=)`, the filter by node, tag or model (`wire.Turn.learns`).

They find a misspelled name in the first batch instead of after the whole fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_art.errors import ConfigError
from langchain_art.wire import Trajectory

_SHOWN = 40


def check_trainable(trainable: Mapping[str, bool] | None) -> dict[str, bool]:
    """`trainable` as it is sent to the server; empty for None.

    Raises:
        ConfigError: it is not a mapping from names to True or False.
    """
    given: Any = {} if trainable is None else trainable
    named = cast("Mapping[Any, Any]", given).items() if isinstance(given, Mapping) else [(None, 0)]
    if any(not isinstance(key, str) or not isinstance(value, bool) for key, value in named):
        raise ConfigError(
            f"got trainable={given!r:.200}, expected names of nodes, tags or models with True or "
            'False, such as {"writer": True, "critic": False}'
        )
    return dict(given)


def unmatched_frozen_names(trainable: Mapping[str, bool], runs: Sequence[Trajectory]) -> list[str]:
    """Names that `trainable` sets to False and that match no turn of `runs`.

    Raises:
        ConfigError: a name that is set to True matches none.
    """
    names = {name for run in runs for turn in run.turns for name in turn.names}
    unknown = sorted(name for name, learns in trainable.items() if learns and name not in names)
    if unknown:
        known = [repr(name) for name in sorted(names)]
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        raise ConfigError(
            f"trainable: {', '.join(map(repr, unknown))} is the name of no model call among the "
            f"{len(runs)} runs of the first batch, so it would train nothing. Its calls are named "
            f"{', '.join(known[:_SHOWN]) or 'nothing: no model call was recorded'}{more}."
        )
    return sorted(name for name, learns in trainable.items() if not learns and name not in names)

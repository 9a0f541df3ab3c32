"""The schemes of credit assignment, each in the module that its `TrainConfig.credit` names.

A module has a function `pools`: the runs of a group, the scheme's settings and
`TrainRequest.compared` to pools with a weight each. To add a scheme, add its settings to
`langchain_art.wire.choices`, a module here, and its line in ``docs/credit.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, get_args

from langchain_art.credit.candidates import Compared, Runs, WeightedPools
from langchain_art.wire.choices import CreditKind

SCHEMES: dict[str, Callable[[Runs, Any, Compared], WeightedPools]] = {
    kind: import_module(f"{__name__}.{kind}").pools for kind in get_args(CreditKind)
}

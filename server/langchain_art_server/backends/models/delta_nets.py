"""Gated delta nets of a model, and other computations in place of their functions.

In such a layer (Gated DeltaNet, arXiv 2412.06464; Qwen3-Next, Qwen3.5, Olmo Hybrid) a token mixes
with those before it by a short convolution and a recurrent state, and by nothing else.
transformers gives the options of a forward pass on to the functions of such a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


def delta_nets(base: nn.Module) -> list[Any]:
    """The layers of this kind."""
    return [
        module
        for module in base.modules()
        if isinstance(getattr(module, "conv1d", None), nn.Conv1d)
        and {CONVOLUTION, RULE} <= functions_of(module).keys()
    ]


def functions_of(layer: nn.Module) -> dict[str, Any]:
    """The names in the module of transformers that defines a layer."""
    return vars(sys.modules[type(layer).__module__])


def divert(layer: nn.Module, name: str, option: str, instead: Callable[..., Any]) -> None:
    """Let a layer's function call `instead` in passes that have the option.

    `instead` is given the function as it was, the option's value, and the function's own arguments.
    All layers of that module of transformers have it then; without the option they do as before.
    """
    functions = functions_of(layer)
    original, options = functions[name], getattr(functions[name], "diverted_by", frozenset[str]())
    if option in options:
        return

    @wraps(original)
    def function(*args: Any, **given: Any) -> Any:
        if (value := given.pop(option, None)) is None:
            return original(*args, **given)
        return instead(original, value, *args, **given)

    vars(function)["diverted_by"] = options | {option}
    functions[name] = function

"""Fits of docs/environments.md, in whichever Python has the environment's library.

    python -m tests.support.environment_fit BASE_URL STEPS SIZE GROUPS < codes

`codes` is a JSON object: policy -> code. Each makes `env`, and `train` that trains `model` on it,
and finds the names of those before it. Here the model says a whole number, a step has GROUPS groups
of SIZE runs, and one scenario is held out. What the fits came to is printed, by policy, with what
the code calls `beside`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_art import ChatART, FitResult, Trainer

NUMBER = {"type": "integer", "minimum": 0, "maximum": 5}
SHAPE = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER}}


def fits(
    codes: Mapping[str, str], base_url: str, steps: int, size: int, groups: int
) -> dict[str, Any]:
    """What the fits of the page's codes came to, each with a policy of its own on a server."""
    names: dict[str, Any] = {"__name__": "page"}
    os.environ["ART_BASE_URL"] = base_url
    sizes: Any = {"group_size": size, "groups_per_step": groups, "dynamic_sampling_rounds": 9}
    found: dict[str, Any] = {}
    for policy, code in codes.items():
        code = code.replace('"player"', f'"{policy}"').replace("openai/player", f"openai/{policy}")
        exec(compile(code, "environments.md", "exec", dont_inherit=True), names)
        shape = {"response_format": SHAPE}
        names["model"] = ChatART(model=policy, max_tokens=8, model_kwargs=shape)
        names["Trainer"] = partial(Trainer, name=policy, **sizes)
        found[policy] = asyncio.run(_fit(names, policy, steps))
    return found


async def _fit(names: dict[str, Any], policy: str, steps: int) -> dict[str, Any]:
    env = names["env"]
    few = replace(env, held_out=env.held_out[:1])
    found: FitResult = await names["train"](few, steps=steps)
    return {
        "parts": [len(env.train), len(env.held_out)],
        "beside": names.get("beside"),
        "steps": [
            {
                "version": step.version,
                "groups": step.groups,
                "deviation": step.reward_std,
                "excluded": step.results[policy].excluded,
                **step.results[policy].metrics,
            }
            for step in found.history
        ],
    }


if __name__ == "__main__":
    base_url, *numbers = sys.argv[1:]
    sys.stdout.write(json.dumps(fits(json.load(sys.stdin), base_url, *map(int, numbers))))

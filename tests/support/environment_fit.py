"""A fit of docs/environments.md, in whichever Python has the environment's library.

    python -m tests.support.environment_fit BASE_URL POLICY STEPS < code

The code makes `env`, and `train` that trains `model` on it. Here the model says a whole number, and
one scenario is held out. What the fit came to is printed, with what the code calls `beside`.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from typing import Any

from langchain_art import ChatART, FitResult

NUMBER = {"type": "integer", "minimum": 0, "maximum": 5}
SHAPE = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER}}


def names_of(code: str, base_url: str, policy: str) -> dict[str, Any]:
    """What the page's code makes, with a policy of its own on a server."""
    names: dict[str, Any] = {"__name__": "page"}
    os.environ["ART_BASE_URL"] = base_url
    code = code.replace('"player"', f'"{policy}"').replace("openai/player", f"openai/{policy}")
    exec(compile(code, "environments.md", "exec", dont_inherit=True), names)
    names["model"] = ChatART(model=policy, max_tokens=8, model_kwargs={"response_format": SHAPE})
    return names


async def fit(names: dict[str, Any], policy: str, steps: int) -> dict[str, Any]:
    env = names["env"]
    few = replace(env, held_out=env.held_out[:1])
    found: FitResult = await names["train"](few, steps=steps)
    return {
        "parts": [len(env.train), len(env.held_out)],
        "beside": names.get("beside"),
        "after": found.after.mean if found.after else None,
        "steps": [
            {
                "version": step.version,
                "groups": step.groups,
                "reward": step.reward_mean,
                "deviation": step.reward_std,
                "excluded": step.results[policy].excluded,
                **step.results[policy].metrics,
            }
            for step in found.history
        ],
    }


if __name__ == "__main__":
    base_url, policy, steps = sys.argv[1:]
    names = names_of(sys.stdin.read(), base_url, policy)
    sys.stdout.write(json.dumps(asyncio.run(fit(names, policy, int(steps)))))

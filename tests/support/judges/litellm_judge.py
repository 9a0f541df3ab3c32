"""A judge by name, in an environment with the extra ``ruler``: tells what it made of a group."""

from typing import Any

from langchain_art import RulerEvaluator, Trajectory, TrajectoryGroup, Turn, ruler_score_group
from langchain_art.errors import ConfigError


async def judged(base_url: str) -> dict[str, Any]:
    runs = [
        Trajectory(id=text, turns=(Turn(reply={"role": "assistant", "content": text}),))
        for text in ("BAD", "GOOD")
    ]
    group = TrajectoryGroup(id="g", trajectories=runs)
    params = {"api_base": base_url, "api_key": "none", "temperature": 1.0}
    judged = await ruler_score_group(group, "openai/o3", params)
    evaluator = RulerEvaluator("openai/o3", litellm_params=params)
    await evaluator.ainvoke(group)
    unpriced = RulerEvaluator("openai/no-such-model", litellm_params=params)
    await unpriced.ainvoke(group)
    try:
        RulerEvaluator("openai/o3", litellm_params={"api_bass": "x"})
        refused = ""
    except ConfigError as error:
        refused = str(error)
    spent = evaluator.spent
    return {
        "rewards": [one.reward for one in judged.trajectories] if judged else None,
        "structured": evaluator.judge.structured,
        "tokens": [spent.input_tokens, spent.output_tokens],
        "cost": spent.cost,
        "unpriced": [spent.unpriced, unpriced.spent.unpriced],
        "refused": refused,
    }

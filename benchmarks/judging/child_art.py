"""ART's released RULER on given groups; runs in an environment of its own.

``python child_art.py CASES BASE_URL MODEL``: CASES is a JSON list of groups, each with its
conversations and tools. For each group, ``art.rewards.ruler_score_group`` as released
asks ``openai/MODEL`` through litellm; on standard output stands, for each, the list of rewards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from art import Trajectory, TrajectoryGroup
from art.rewards import ruler_score_group


async def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    params = {"api_base": sys.argv[2], "api_key": "none"}
    for case in cases:
        group = TrajectoryGroup(
            Trajectory(messages_and_choices=messages, tools=case["tools"], reward=0.0)
            for messages in case["runs"]
        )
        scored = await ruler_score_group(group, f"openai/{sys.argv[3]}", params)
        rewards = [trajectory.reward for trajectory in scored.trajectories]
        print(json.dumps({"rewards": rewards}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

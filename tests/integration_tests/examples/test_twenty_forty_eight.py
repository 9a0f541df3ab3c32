"""The 2048 example on a real server, and on a hosted model."""

from pathlib import Path
from typing import Any

import pytest

from examples.twenty_forty_eight.agent import SYSTEM_PROMPT, build_agent
from examples.twenty_forty_eight.environment import PENALTY, TARGET, Game, random_game
from examples.twenty_forty_eight.train import DEMO
from langchain_art import ArtClient
from tests.support.examples import HostedModel, evaluation, server_of, short_fit
from tests.support.soak import in_soak


# `test_tic_tac_toe.py` has a fit of this kind in `make test`.
@in_soak
@pytest.mark.slow
def test_games_are_played_rewarded_and_trained_on(tmp_path: Path) -> None:
    with server_of(DEMO, tmp_path) as server:
        found = short_fit(DEMO, server.base_url, tmp_path / "out")
        names = {"highest_tile", f"reached_{TARGET}", "won_against_random", "moves_without_effect"}
        assert found["measures"].keys() == names
        assert 4 <= found["measures"]["highest_tile"]["before"]["mean"] <= TARGET
        with ArtClient(server.base_url) as client:
            for run in client.trajectories(20):
                highest = run.scores["highest_tile"]
                rewards = [turn.reward for turn in run.turns]
                if str(run.scenario).startswith("test"):
                    assert run.reward == highest / TARGET and not any(rewards)
                else:
                    assert run.reward is None
                    assert {-PENALTY, 0.0, 4 / TARGET, 8 / TARGET} >= set(rewards[:2])
                    wasted = rewards.count(-PENALTY) / len(rewards)
                    assert run.scores["moves_without_effect"] == wasted
                chance = random_game(str(run.scenario)).highest
                against = 0.5 if highest == chance else float(highest > chance)
                assert run.scores["won_against_random"] == against
                assert len(run.turns) > 5
        said = evaluation(DEMO, "--base-url", server.base_url, "--n", "4")
        assert "2048@1: " in said and "highest_tile: " in said


async def test_the_agent_runs_on_a_hosted_model() -> None:
    def left_or_down(body: dict[str, Any]) -> dict[str, Any]:
        system, user = body["messages"]
        assert system == {"role": "system", "content": SYSTEM_PROMPT}
        moves = dict(line.split(": ") for line in user["content"].split("\n")[3:])
        found = [move for move in ("left", "down", "up", "right") if moves[move] != "nothing"]
        return {"content": f"I move {found[0]}."}

    with HostedModel(left_or_down) as hosted:
        game = Game("hosted")
        await build_agent(hosted.chat).ainvoke({"game": game})
        assert game.is_over and game.illegal == 0
        assert len(hosted.requests) == game.made > 5

"""The tic-tac-toe example on a real server: self-play, older versions, the perfect player."""

from pathlib import Path
from typing import Any

import pytest

from examples.tic_tac_toe.agent import SYSTEM_PROMPT, Match, build_agent, points
from examples.tic_tac_toe.environment import EMPTY, best_moves
from examples.tic_tac_toe.train import DEMO
from langchain_art import ArtClient
from tests.support.examples import HostedModel, evaluation, server_of, short_fit


@pytest.mark.slow
def test_both_sides_learn_and_older_versions_do_not(tmp_path: Path) -> None:
    with server_of(DEMO, tmp_path) as server:
        found = short_fit(DEMO, server.base_url, tmp_path / "out", 2)
        assert found["measures"].keys() == {"draws", "losses", "losses_by_illegal_move"}
        for when in ("before", "after"):
            draws, losses = (found["measures"][name][when]["mean"] for name in ("draws", "losses"))
            assert draws == found[when]["mean"] and draws + losses == 1
        with ArtClient(server.base_url) as client:
            runs = client.trajectories(1000)
        turns = [turn for run in runs for turn in run.turns]
        assert {turn.node for turn in turns} == {"x", "o", "older"}
        assert "tic-tac-toe@0" in {turn.model for turn in turns if turn.node == "older"}
        for run in runs:
            rewarded = [turn.node for turn in run.turns if turn.reward is not None]
            if str(run.scenario).startswith("train"):
                assert run.reward is None
                assert sorted(rewarded) == sorted({t.node for t in run.turns} - {"older"})
            else:
                assert run.reward in (0.0, 1.0) and not rewarded
        assert found["excluded"]["calls.frozen"] > 0
        said = evaluation(DEMO, "tic-tac-toe@1", "--base-url", server.base_url, "--n", "2")
        assert "tic-tac-toe@1: " in said and "losses: " in said


async def test_the_agent_runs_on_a_hosted_model() -> None:
    def perfect(body: dict[str, Any]) -> dict[str, Any]:
        system, user = body["messages"]
        assert system == {"role": "system", "content": SYSTEM_PROMPT}
        cells = user["content"].replace("\n", " ").split()[:9]
        board = "".join(cell if cell in "XO" else "." for cell in cells)
        return {"content": f"I take {'abcdefghi'[best_moves(board)[0]]}."}

    with HostedModel(perfect) as hosted:
        agent = build_agent(hosted.chat)
        for match in (Match("X"), Match("O"), Match(opponent="self")):
            state = await agent.ainvoke({"board": EMPTY}, context=match)
            assert points(state) == {"X": 0.5, "O": 0.5}
    with HostedModel(lambda body: {"content": "Good luck!"}) as hosted:
        state = await build_agent(hosted.chat).ainvoke({"board": EMPTY}, context=Match("O"))
        assert state["illegal"] == "O" and points(state)["O"] == 0.0

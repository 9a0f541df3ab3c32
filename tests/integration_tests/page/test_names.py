"""Runs, scenarios, nodes, scores and reviewers whose names JavaScript's objects have already."""

from typing import Any

import pytest
from playwright.sync_api import expect

from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import Trajectory, TrajectoryGroup, Turn
from tests.support.browser import Watched
from tests.support.reviewed_runs import human_reward
from tests.support.soak import count

NAMES = ("constructor", "__proto__", "toString", "key")


def named(name: str) -> Trajectory:
    """A run by whose name all in it is called, too."""
    said = {"role": "assistant", "content": name}
    turn = Turn(node=name, reply=said, messages=({"role": "user", "content": name},))
    # No score has a reason, and the reason that there is has no score.
    metadata = {"judged": {"valueOf": "why"}} | {name: name for name in NAMES}
    told: Any = {"turns": (turn,), "scores": dict.fromkeys(NAMES, 1.0), "metadata": metadata}
    reward = float(NAMES.index(name) % 2)
    return Trajectory(id=name.strip("_"), scenario="constructor", reward=reward, **told)


@pytest.mark.soak
def test_runs_may_have_names_that_objects_have(watched: Watched, client: ArtClient) -> None:
    runs = tuple(map(named, NAMES))
    client.post_groups([TrajectoryGroup(id="constructor", trajectories=runs)])
    client.put_reviews(
        [
            human_reward(run, 1.0, name=name, reviewer=name)
            for run, name in zip(runs, NAMES, strict=True)
        ]
    )
    for name in NAMES[: count(2, 4)]:
        run = name.strip("_")
        for view in (f"runs/{run}/siblings", f"runs/{run}", "runs?scenario=constructor"):
            page = watched.go(view)
            expect(page.locator("main .waiting")).to_have_count(0)
            expect(page.get_by_text(name).first).to_be_visible()
            if view.endswith("siblings"):
                expect(page.get_by_text("valueOf: why")).to_have_count(len(NAMES))
                expect(page.get_by_text(f"{name} 1", exact=True)).to_have_count(len(NAMES))
    watched.go("review")
    expect(watched.page.locator("main .waiting")).to_have_count(0)

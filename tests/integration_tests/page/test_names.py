"""Runs, scenarios, nodes, scores and reviewers whose names JavaScript's objects have already."""

import pytest
from playwright.sync_api import expect

from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import Review, Trajectory, TrajectoryGroup, Turn
from tests.support.browser import Watched
from tests.support.live_server import LiveServer

NAMES = ("constructor", "__proto__", "toString", "key")


@pytest.fixture(scope="module")
def named(art_server: LiveServer) -> LiveServer:
    """A group of a run for each name, by which all else in it is called, too."""
    runs = [
        Trajectory(
            id=name.strip("_"),
            scenario="constructor",
            turns=(
                Turn(
                    node=name,
                    reply={"role": "assistant", "content": name},
                    messages=({"role": "user", "content": name},),
                ),
            ),
            reward=float(at % 2),
            scores=dict.fromkeys(NAMES, 1.0),
            # No score has a reason, and the reason that there is has no score.
            metadata={"judged": {"valueOf": "why"}} | {name: name for name in NAMES},
        )
        for at, name in enumerate(NAMES)
    ]
    with ArtClient(art_server.base_url) as client:
        client.post_groups([TrajectoryGroup(id="constructor", trajectories=tuple(runs))])
        client.put_reviews(
            [
                Review(
                    id=f"name-{one}",
                    trajectory=one.strip("_"),
                    kind="reward",
                    name=one,
                    value=1.0,
                    reviewer=one,
                    source="page",
                    at=1.0,
                )
                for one in NAMES
            ]
        )
    return art_server


def test_runs_may_have_names_that_objects_have(watched: Watched, named: LiveServer) -> None:
    for name in NAMES:
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

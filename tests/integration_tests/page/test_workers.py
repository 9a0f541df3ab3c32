"""The workers on the overview: what they do, as it happens."""

import uuid

from playwright.sync_api import expect

from langchain_art import ArtClient
from langchain_art.wire import AttemptOutcome, LeaseRequest, LeasesReturned, QueuedRollout
from tests.support.browser import Watched
from tests.support.live_server import LiveServer


def test_the_overview_shows_what_workers_do(watched: Watched, art_server: LiveServer) -> None:
    name, batch = f"box:{uuid.uuid4().hex[:6]}", uuid.uuid4().hex
    worker, rollout = f"w-{batch}", "my_agent:<b>rollout</b>"
    page = watched.go("overview")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    with ArtClient(art_server.base_url) as client:
        client.put_rollouts(batch, rollout, [QueuedRollout(id=f"{batch}-{n}") for n in range(3)])
        said = page.get_by_role("alert").filter(has_text="3 rollouts wait, and no worker runs them")
        expect(said).to_contain_text("langchain-art worker MODULE:FUNCTION --server URL")
        asked = LeaseRequest(worker=worker, name=name, rollout=rollout, slots=4, free=2)
        leases = client.lease_rollouts(asked).leases
        row = page.get_by_role("table").filter(has_text=name).get_by_role("row").last
        expect(row).to_contain_text("2 of 4")  # nothing is reloaded
        expect(row).to_contain_text(rollout)
        expect(page.get_by_text("1 rollouts wait, 2 are leased, 0 are finished")).to_be_visible()
        outcome = AttemptOutcome(trajectory_id=leases[0].trajectory_id, error="no such tool")
        client.complete_rollout(leases[0].id, outcome)
        expect(row.get_by_role("cell").nth(4)).to_have_text("1")
        client.return_leases(LeasesReturned(worker=worker, leaving=True))
        expect(page.get_by_text(name)).to_have_count(0)
        client.cancel_rollouts(batch)
        expect(page.get_by_role("heading", name="Workers")).to_have_count(0)

"""The overview in a real browser: it moves while a policy trains, and says what was left out."""

import json
import re
import time
import uuid

import httpx
import pytest
from playwright.sync_api import Route, expect

from langchain_art import ArtClient
from langchain_art.wire import AttemptOutcome, LeaseRequest, LeasesReturned, QueuedRollout
from tests.support.browser import Watched
from tests.support.live_server import LiveServer
from tests.support.markup_strings import markup_strings, some_markup_strings
from tests.support.steps_of_a_fit import evaluate, ok, run_of, step


def test_curves_move_while_a_policy_trains(watched: Watched, http: httpx.Client) -> None:
    policy = f"watched-{uuid.uuid4().hex[:8]}"
    page = watched.go("overview")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    ok(http.post("/v1/policies", json={"name": policy}))
    job = step(http, policy, "fit-a-0123456789ab", 1, (0.0, 1.0))
    assert job["state"] == "succeeded", job
    # Nothing is reloaded: what follows comes by the stream.
    name = f"{policy} · fit-a"
    reward = page.get_by_role("img", name=re.compile(rf"^Reward\..*{name}: 0.5 at step 1"))
    expect(reward).to_be_visible()
    reward.scroll_into_view_if_needed()  # it is drawn when seen, and others may stand above
    expect(reward.locator("canvas")).to_have_count(1)
    expect(page.get_by_role("cell", name=f"{policy}@1", exact=True)).to_be_visible()
    expect(page.locator(".legend").get_by_text(name)).to_be_visible()
    # All runs of the group are alike: nothing is learned, which is said in red.
    job = step(http, policy, "fit-a-0123456789ab", 2, (1.0, 1.0))
    assert job["result"]["excluded"], job
    said = page.get_by_role("alert").filter(has_text=f"Step 2 of {name} learned nothing")
    expect(said).to_contain_text("groups.zero_variance")
    # Another fit of the same policy stands beside it.
    step(http, policy, "fit-b", 1, (0.0, 1.0))
    both = page.get_by_role("img", name=re.compile(rf"^Reward\..*{policy} · fit-b: 0.5"))
    expect(both).to_be_visible()
    page.get_by_role("checkbox", name=re.compile(f"{policy} · fit-b")).uncheck()
    expect(both).to_have_count(0)


def test_held_out_reward_and_what_the_fit_measured_are_drawn(
    watched: Watched, own_policy: str, http: httpx.Client
) -> None:
    page = watched.go("overview")
    evaluate(http, f"{own_policy}@0", {"a": 0.0, "b": 0.5})
    seconds = {"rollout": 12.5, "judge": 3.25}
    job = step(http, own_policy, "fit-a", 1, seconds=seconds)
    sampled = job["result"]["metrics"]["tokens_sampled"]
    assert sampled > 0
    for title, said in {
        "Held-out reward": r"0\.25 ± 0\.49 at step 0",
        "Rollout time": r"12\.5 at step 1",
        "Judging time": r"3\.25 at step 1",
        "Tokens sampled": rf"{sampled:.0f} at step 1",
        "Truncated replies": r"[\d.]+ at step 1",
        "Staleness": r"0 at step 1",
    }.items():
        drawn = re.compile(rf"^{title}\..*{own_policy} · fit-a: {said}")
        expect(page.get_by_role("img", name=drawn)).to_be_visible()
    evaluate(http, f"{own_policy}@1", {"a": 1.0, "b": 1.0})
    last = re.compile(rf"^Held-out reward\..*{own_policy} · fit-a: 1 ± 0 at step 1")
    expect(page.get_by_role("img", name=last)).to_be_visible()  # by itself


def test_a_stream_says_what_changes(art_server: LiveServer) -> None:
    with art_server.http() as http, http.stream("GET", "/page/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if not line.startswith(":"))
        assert [next(lines) for _ in range(4)] == ["retry: 1000", "event: hello", "data: {}", ""]

        def changed(what: set[str]) -> None:
            """Of what the stream says, until it says that some of this has changed."""
            told = (json.loads(one[6:]) for one in lines if one.startswith("data: "))
            assert any(what & set(one["changed"]) for one in told)

        with art_server.http() as other:
            run = run_of(other, art_server.policy, 1.0, 1)
            changed({"runs", "calls"})
            run_of(other, art_server.policy, 1.0, 1)  # the newest stays
            ok(other.put(f"/v1/trajectories/{run}/reward", json={"reward": 0.5}))  # late
            changed({"rewards"})
            ok(other.delete(f"/v1/trajectories/{run}"))
            changed({"rewards"})


def test_what_happens_before_the_stream_begins_is_shown(
    watched: Watched, art_server: LiveServer
) -> None:
    """The page has its first answers already, and no event will tell it of what comes now."""
    policy = f"early-{uuid.uuid4().hex[:8]}"

    def late(route: Route) -> None:
        time.sleep(1.0)
        with art_server.http() as http:
            ok(http.post("/v1/policies", json={"name": policy}))
            step(http, policy, "fit-a", 1, (0.0, 1.0))
        route.continue_()

    watched.page.route("**/page/events", late)
    page = watched.go("overview")
    expect(page.get_by_role("cell", name=f"{policy}@1", exact=True)).to_be_visible()


@pytest.mark.soak
def test_what_a_client_says_is_text(watched: Watched, own_policy: str, http: httpx.Client) -> None:
    """Names and reasons that clients choose are shown in the log and among what was excluded."""
    strings = some_markup_strings()
    page = watched.go("overview")
    hostile = dict.fromkeys(strings, True)
    job = step(http, own_policy, "fit-a", 1, (0.0, 1.0), trainable=hostile)
    assert job["result"]["excluded"], job
    said = ok(http.get(f"/v1/jobs/{job['id']}/events"))["data"]
    assert any("onerror" in one["message"] for one in said)
    expect(
        page.get_by_role("alert").filter(has_text=f"{own_policy} · fit-a learned")
    ).to_be_visible()
    # The same in a log that stays to be read: the real job's, answered once more as running.
    facts = ok(http.get("/page/overview"))
    log = [one | {"message": f"{one['message']} {text}"} for one in said for text in strings]
    facts["open_jobs"] = [{"job": job | {"state": "running"}, "progress": 0.5, "log": log}]
    facts["series"][0]["fit"] = strings[0]
    facts["series"][0]["steps"][-1]["excluded"] = dict.fromkeys(strings, 1)
    facts["reasons"] = {one: one for one in strings}
    facts["clients"] = [{"address": one, "running": 0, "idle_seconds": 1} for one in strings]
    facts["status"]["reasons"] = {one: one for one in strings}
    page.route("**/page/overview", lambda route: route.fulfill(json=facts))
    page.reload()
    page.get_by_text("Log", exact=True).click()
    page.wait_for_function(
        "text => document.body.textContent.includes(text)", arg=strings[-1].strip()
    )
    shown = page.locator("body").evaluate("body => body.textContent")
    for text in strings:
        assert text.strip() in shown, text
    assert page.evaluate("window.pwned") is None


def test_each_replica_of_the_sampler_is_shown(watched: Watched) -> None:
    def replicated(route: Route) -> None:
        told = route.fetch()
        facts = told.json()
        whole = {"problem": None, "running_calls": 5, "restarts": 0, "missing": 0}
        away = whole | {"problem": "its process is being started", "missing": 2}
        facts["status"]["replicas"] = [whole | {"name": "0"}, away | {"name": "1"}]
        route.fulfill(response=told, json=facts)

    watched.page.route("**/page/overview", replicated)
    table = watched.go("overview").get_by_role("region", name="Replicas of the sampler")
    expect(table.get_by_role("row")).to_have_text(
        [re.compile("Replica"), re.compile("^0answers500$"), re.compile("^1its process.*502$")]
    )


def test_the_overview_shows_what_workers_do(watched: Watched, client: ArtClient) -> None:
    name, batch = f"box:{uuid.uuid4().hex[:6]}", uuid.uuid4().hex
    worker, rollout = f"w-{batch}", "my_agent:<b>rollout</b>"
    page = watched.go("overview")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
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


def test_what_each_node_learned_from(watched: Watched, own_policy: str, http: httpx.Client) -> None:
    node = markup_strings()[0][:64]
    job = step(http, own_policy, "fit-a", 1, node=node)
    report = job["result"]["nodes"][node]
    page = watched.go(f"jobs?policy={own_policy}")
    expect(page.get_by_role("heading", name=f"Nodes of {own_policy}, by version")).to_be_visible()
    expect(page.locator(".legend")).to_have_text(node)
    page.get_by_role("link", name=f"fit-a:{own_policy}:step:1").click()
    row = page.get_by_role("table", name="").get_by_role("row").nth(1)
    expect(row).to_contain_text(node)
    cells = row.get_by_role("cell")
    expect(cells.nth(1)).to_have_text(str(report["calls"]))
    expect(cells.nth(2)).to_have_text(str(report["tokens"]))
    expect(page.get_by_text(f"{own_policy}@1 serves")).to_be_visible()  # the log
    assert page.evaluate("window.pwned") is None

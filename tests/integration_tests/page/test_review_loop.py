"""Reviews without Langfuse, in a real browser: from the queue to the blind comparison."""

import re

import httpx
from playwright.sync_api import Page, expect

from langchain_art.client.sync_client import ArtClient
from langchain_art.statistics.intervals import sign_test
from langchain_art.wire import ReviewTraining
from tests.support.browser import Watched
from tests.support.reviewed_runs import MakeRuns
from tests.support.steps_of_a_fit import evaluate


def review(page: Page, value: str) -> None:
    form = page.get_by_role("form", name="Give a review")
    form.get_by_label("Value").fill(value)
    form.get_by_role("button", name="Say what it will do").click()
    form.get_by_role("button", name="Save").click()
    expect(page.get_by_text("Saved.")).to_be_visible()


def test_what_people_say_is_planned_trained_and_compared_blind(
    watched: Watched, own_policy: str, make_runs: MakeRuns, client: ArtClient, http: httpx.Client
) -> None:
    policy = own_policy
    runs = make_runs(3)
    held_out = {f"{policy}-{i}": 0.0 for i in range(3)}
    evaluate(http, f"{policy}@0", held_out, node="writer")

    page = watched.go(f"review?pick=random&policy={policy}")
    rows = page.get_by_role("region", name="Runs").get_by_role("row")
    expect(rows).to_have_count(7)
    expect(rows.filter(has_text="measures: held out")).to_have_count(3)
    expect(page.get_by_text("Nothing: review several runs")).to_be_visible()

    def queue_of(who: str, size: int) -> None:
        watched.go(f"review?pick=random&policy={policy}")
        page.get_by_label("Your name").fill(who)
        page.get_by_role("button", name="Show what I have not reviewed").click()
        expect(page.get_by_label("Your name")).to_have_value(who)
        expect(rows).to_have_count(size + 1)

    # Two people; on the last run they disagree. Neither reads the other's verdict before.
    said = {"Ann": ("1", "0", "1"), "Bob": ("1", "0", "0")}
    for who, values in said.items():
        for number, (run, value) in enumerate(zip(runs, values, strict=True)):
            queue_of(who, 6 - number)
            page.get_by_role("link", name=run.id).click()
            expect(page.get_by_label("Your name")).to_have_value(who)
            expect(page.locator(".reviews li")).to_have_count(0)
            review(page, value)
            expect(page.locator(".reviews li")).to_have_count(1 + (who == "Bob"))
    queue_of("Cho", 4)  # what two agree on is done
    expect(page.get_by_text("3 runs have several reviewers")).to_be_visible()
    expect(rows.nth(1)).to_contain_text(runs[2].id)
    expect(rows.nth(1)).to_contain_text("decides: two reviewers disagree")
    plan = page.get_by_role("region", name="By node")
    expect(plan.get_by_role("row").nth(1)).to_have_text("writer20")
    expect(page.get_by_text(re.compile("1 . reward: disagreement"))).to_be_visible()
    page.get_by_role("link", name=runs[2].id).click()
    review(page, "0")
    page.get_by_role("link", name="To what is to review").click()
    expect(plan.get_by_role("row").nth(1)).to_have_text("writer30")

    page.get_by_role("button", name=f"Train {policy} on 3 runs, 0 calls and 0 corrections").click()
    expect(page.get_by_text("Ordered: job 1.")).to_be_visible()
    [job] = client.jobs(policy)
    assert client.wait(job).version == 1
    expect(page.get_by_text(re.compile("3 . reward: trained"))).to_be_visible()  # by itself
    expect(page.get_by_text("Nothing: review several runs")).to_be_visible()

    evaluate(http, f"{policy}@1", held_out, node="writer")
    watched.go(f"versions/{policy}?before={policy}@0&after={policy}@1")
    page.get_by_role("link", name="Compare their runs blind").click()
    expect(page.get_by_role("form", name="Compare blind")).to_be_visible()
    expect(page.get_by_role("region", name="Preference")).to_have_count(0)
    page.get_by_label("Your name").fill("Ann")
    page.get_by_role("button", name="Compare 3 pairs").click()
    later = {one.id for one in client.trajectories(3)}
    for number in range(3):
        expect(page.get_by_text(f"Pair {number + 1} of 3")).to_be_visible()
        shown = page.get_by_role("region", name="Two runs").inner_text()
        assert f"{policy}@" not in shown and "reward" not in shown.lower()
        assert not [one for one in later if one in shown]
        with page.expect_request("**/v1/reviews") as sent:
            if number < 2:  # Ann says that the left one is better, and at last that none is
                page.get_by_role("button", name="Left is better").click()
            else:
                page.get_by_role("button", name="Neither").click()
        body = sent.value.post_data_json
        assert body is not None and body["reviews"][0]["reviewer"] == "Ann"
    expect(page.get_by_text("You have compared all 3 pairs.")).to_be_visible()
    given = [
        one
        for one in client.reviews(policy=policy)
        if one.name.startswith("better_than:") and one.value == 1
    ]
    better = sum(one.trajectory in later for one in given)
    found = page.get_by_role("region", name="Preference")
    chance = sign_test(better, 2 - better)
    for name, value in {"Better": str(better), "Worse": str(2 - better), "Ties": "1"}.items():
        fact = found.locator(".fact").filter(has_text=name)
        expect(fact.locator(".fact-value")).to_contain_text(value)
    expect(found).to_contain_text(f"p = {chance:g}")
    plan_now = client.plan_reviews(ReviewTraining(policy=policy))
    assert plan_now.groups == ()  # a choice trains nothing

"""Versions in a real browser: one is pinned, served again, and downloaded."""

import io
import tarfile
from pathlib import Path

import httpx
from playwright.sync_api import expect

from tests.support.browser import Watched
from tests.support.markup_strings import markup_strings
from tests.support.steps_of_a_fit import evaluate, ok, run_of, step


def test_a_version_is_pinned_rolled_back_to_and_downloaded(
    watched: Watched, own_policy: str, http: httpx.Client
) -> None:
    page = watched.go(f"versions/{own_policy}")
    table = page.get_by_role("table")
    expect(table.get_by_role("row")).to_have_count(2)
    step(http, own_policy, "fit-a", 1)
    expect(table.get_by_role("row")).to_have_count(3)  # by itself
    expect(table.get_by_role("row").nth(1)).to_contain_text("serves")

    page.get_by_role("button", name=f"Pin {own_policy}@1").click()
    expect(page.get_by_role("button", name=f"Unpin {own_policy}@1")).to_be_visible()
    kept = ok(http.get(f"/v1/policies/{own_policy}/checkpoints"))["data"]
    assert [one["pinned"] for one in kept] == [False, True]

    page.get_by_role("button", name=f"Serve {own_policy}@0…").click()
    expect(page.get_by_role("status")).to_contain_text("the next training step starts from it")
    assert ok(http.get(f"/v1/policies/{own_policy}"))["version"] == 1  # said before it is done
    page.get_by_role("button", name=f"Serve {own_policy}@0", exact=True).click()
    expect(table.get_by_role("row").nth(2)).to_contain_text("serves")
    assert ok(http.get(f"/v1/policies/{own_policy}"))["version"] == 0

    with page.expect_download() as taken:
        page.get_by_role("link", name=f"Download {own_policy}@1").click()
    assert taken.value.suggested_filename == f"{own_policy}@1.tar"
    found = Path(taken.value.path()).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(found)) as archive:
        assert "adapter_model.safetensors" in {Path(n).name for n in archive.getnames()}


def test_two_versions_are_compared_on_the_same_held_out_scenarios(
    watched: Watched, own_policy: str, http: httpx.Client
) -> None:
    strange = markup_strings()[0][:64]
    page = watched.go(f"versions/{own_policy}")
    expect(page.get_by_text("eval_scenarios=held_out")).to_be_visible()  # how to get there
    step(http, own_policy, "fit-a", 1)
    before = {f"q-{i}": 0.0 for i in range(6)} | {strange: 1.0, "same": 0.5}
    after = {f"q-{i}": 1.0 for i in range(6)} | {strange: 0.0, "same": 0.5, "new": 1.0}
    evaluate(http, f"{own_policy}@0", before, node="writer")
    evaluate(http, f"{own_policy}@1", after, node="writer")
    table = page.get_by_role("table").first
    expect(table.get_by_role("row").nth(1)).to_contain_text("0.833 ± ")  # 7.5 of 9, by itself

    chosen = page.get_by_label("Before", exact=True)
    chosen.select_option(f"{own_policy}@1")
    run_of(http, own_policy, 1.0, 1)  # what is chosen stays when something happens
    page.wait_for_timeout(1500)
    expect(chosen).to_have_value(f"{own_policy}@1")
    chosen.select_option(f"{own_policy}@0")
    page.get_by_role("button", name="Compare", exact=True).click()
    found = page.get_by_role("region", name="Difference")
    expect(found).to_contain_text(f"{own_policy}@1 against {own_policy}@0 on the same 8 held-out")
    expect(found).to_contain_text("; 1 that only one of them ran are left out")
    expect(found).to_contain_text("+0.625 ± ")
    for name, value in {"Wins": "6", "Losses": "1", "Ties": "1"}.items():
        fact = found.locator(".fact").filter(has_text=name)
        expect(fact.locator(".fact-value")).to_have_text(value)
    rows = page.get_by_role("region", name="By scenario").get_by_role("row")
    expect(rows).to_have_count(9)
    expect(rows.nth(1)).to_contain_text("lost")  # the greatest loss comes first
    expect(rows.nth(1)).to_contain_text(strange)
    nodes = page.get_by_role("region", name="By node, before → after").get_by_role("row")
    expect(nodes.nth(1)).to_contain_text("writer")
    expect(nodes.nth(1)).to_contain_text("1 → 1")
    expect(nodes.nth(1)).to_contain_text("$")
    assert page.evaluate("window.pwned") is None
    page.reload()  # the address holds the comparison
    expect(found).to_contain_text("+0.625 ± ")
    expect(chosen).to_have_value(f"{own_policy}@0")
    rows.nth(2).get_by_role("link").last.click()
    expect(page.get_by_text("same", exact=True)).to_be_visible()  # its run


def test_what_was_not_evaluated_is_not_compared(http: httpx.Client) -> None:
    asked = {"before": "nobody@0", "after": "nobody@1"}
    answer: httpx.Response = http.get("/page/comparison", params=asked)
    assert answer.status_code == 404
    assert "No run of an evaluation of 'nobody@0'" in answer.text


def test_a_version_that_was_rolled_back_says_why(
    watched: Watched, own_policy: str, http: httpx.Client
) -> None:
    strange = markup_strings()[0]
    for number in (1, 2):
        step(http, own_policy, "fit-a", number)
    page = watched.go(f"versions/{own_policy}")
    rows = page.get_by_role("table").get_by_role("row")
    expect(rows).to_have_count(4)
    expect(rows.get_by_text("rolled back")).to_have_count(0)
    back = {"version": 0, "why": f"step 2: held-out reward fell {strange}"}
    ok(http.post(f"/v1/policies/{own_policy}/rollback", json=back))
    step(http, own_policy, "fit-a", 3)  # @3, whose parent is @0
    expect(rows).to_have_count(5)
    expect(rows.nth(1)).to_contain_text("serves")
    for row in (2, 3):
        expect(rows.nth(row)).to_contain_text("rolled back")
        expect(rows.nth(row)).to_contain_text("To @0, ")
        expect(rows.nth(row)).to_contain_text(f"held-out reward fell {strange}")
    expect(rows.get_by_text("rolled back")).to_have_count(2)
    assert page.evaluate("window.pwned") is None

    ok(http.post(f"/v1/policies/{own_policy}/rollback", json={"version": 1}))
    expect(rows.nth(3)).to_contain_text("serves")  # @1 is in service again
    expect(rows.nth(3)).not_to_contain_text("rolled back")
    expect(rows.nth(2)).to_contain_text("held-out reward fell")
    expect(rows.nth(1)).to_contain_text("no reason was given")
    for wrong in ({"version": True}, {"version": "0"}, {"version": 0, "because": "x"}):
        answer = http.post(f"/v1/policies/{own_policy}/rollback", json=wrong)
        assert answer.status_code == 400, answer.text

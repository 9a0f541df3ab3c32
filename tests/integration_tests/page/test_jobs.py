"""The jobs in a real browser: what each node learned from, whatever the nodes are called."""

import uuid

from playwright.sync_api import expect

from tests.support.browser import Watched
from tests.support.live_server import LiveServer
from tests.support.markup_strings import markup_strings
from tests.support.steps_of_a_fit import ok, step


def test_what_each_node_learned_from(watched: Watched, art_server: LiveServer) -> None:
    policy = f"nodes-{uuid.uuid4().hex[:8]}"
    node = markup_strings()[0][:64]
    with art_server.http() as http:
        ok(http.post("/v1/policies", json={"name": policy}))
        job = step(http, policy, "fit-a", 1, node=node)
        report = job["result"]["nodes"][node]
        page = watched.go(f"jobs?policy={policy}")
        expect(page.get_by_role("heading", name=f"Nodes of {policy}, by version")).to_be_visible()
        expect(page.locator(".legend")).to_have_text(node)
        page.get_by_role("link", name=f"fit-a:{policy}:step:1").click()
        row = page.get_by_role("table", name="").get_by_role("row").nth(1)
        expect(row).to_contain_text(node)
        cells = row.get_by_role("cell")
        expect(cells.nth(1)).to_have_text(str(report["calls"]))
        expect(cells.nth(2)).to_have_text(str(report["tokens"]))
        expect(page.get_by_text(f"{policy}@1 serves")).to_be_visible()  # the log
        assert page.evaluate("window.pwned") is None

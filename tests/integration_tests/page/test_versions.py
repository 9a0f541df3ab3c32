"""Versions in a real browser: one is pinned, served again, and downloaded."""

from __future__ import annotations

import io
import tarfile
import uuid
from pathlib import Path

from playwright.sync_api import expect

from tests.support.browser import Watched
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import ok, step


def test_a_version_is_pinned_rolled_back_to_and_downloaded(
    watched: Watched, art_server: LiveServer
) -> None:
    policy = f"kept-{uuid.uuid4().hex[:8]}"
    with art_server.http() as http:
        ok(http.post("/v1/policies", json={"name": policy}))
        page = watched.go(f"versions/{policy}")
        table = page.get_by_role("table")
        expect(table.get_by_role("row")).to_have_count(2)
        step(http, policy, "fit-a", 1)
        expect(table.get_by_role("row")).to_have_count(3)  # by itself
        expect(table.get_by_role("row").nth(1)).to_contain_text("serves")

        page.get_by_role("button", name=f"Pin {policy}@1").click()
        expect(page.get_by_role("button", name=f"Unpin {policy}@1")).to_be_visible()
        kept = ok(http.get(f"/v1/policies/{policy}/checkpoints"))["data"]
        assert [one["pinned"] for one in kept] == [False, True]

        page.get_by_role("button", name=f"Serve {policy}@0…").click()
        expect(page.get_by_role("status")).to_contain_text("the next training step starts from it")
        assert ok(http.get(f"/v1/policies/{policy}"))["version"] == 1  # said before it is done
        page.get_by_role("button", name=f"Serve {policy}@0", exact=True).click()
        expect(table.get_by_role("row").nth(2)).to_contain_text("serves")
        assert ok(http.get(f"/v1/policies/{policy}"))["version"] == 0

        with page.expect_download() as taken:
            page.get_by_role("link", name=f"Download {policy}@1").click()
        assert taken.value.suggested_filename == f"{policy}@1.tar"
        found = Path(taken.value.path()).read_bytes()
        with tarfile.open(fileobj=io.BytesIO(found)) as archive:
            assert "adapter_model.safetensors" in {Path(n).name for n in archive.getnames()}

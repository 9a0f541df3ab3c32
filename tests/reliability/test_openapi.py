"""Requests that the OpenAPI document allows, and those that it forbids: answered as it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from langchain_art.wire.api_keys import SCOPES, new_api_key
from tests.support.seeds import drawn_seed
from tests.support.soak import count, share
from tests.support.stub_engines import StubServer

#: Of each operation, beside some thousands of schemathesis' own that cover every keyword.
EXAMPLES = count(3, 300)
#: Of the paths; in the part a reward and chat completions.
PATHS = slice(None) if share() else slice(14, None, 24)


@pytest.mark.parametrize("kind", ["the server's", *(SCOPES if share() else ())])
@pytest.mark.soak("S4", EXAMPLES, "generated requests of each operation, beside those of coverage")
@pytest.mark.slow
@pytest.mark.timeout(count(600, 3600))
def test_no_generated_request_is_answered_otherwise_than_documented(
    tmp_path: Path, kind: str
) -> None:
    """With the server's key, two paths; in the soak all paths, and a key of each scope."""
    key, document = new_api_key(), tmp_path / "openapi.json"
    server = StubServer(tmp_path / "data", env={"ART_API_KEY": key}).start()
    with server.http() as client:
        found = client.get("/openapi.json").json()
        found["paths"] = dict([*found["paths"].items()][PATHS])
        document.write_text(json.dumps(found))
        if kind in SCOPES:
            asked = {"name": kind, "tenant": "ana", "scopes": [kind]}
            key = client.post("/v1/keys", json=asked).json()["key"]
    argv = [sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", server.root]
    argv += ["--header", f"Authorization: Bearer {key}", "--seed", str(drawn_seed())]
    checks = ("not_a_server_error", "status_code", "content_type", "response_schema")
    argv += ["--checks", ",".join([checks[0], *(f"{one}_conformance" for one in checks[1:])])]
    argv += ["--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
    argv += ["--request-timeout", "20", "--no-color", "--continue-on-failure"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:]
        sent = int(re.findall(r"(\d+) generated", done.stdout)[-1])
        assert sent > count(300, 10_000)
        with server.http() as client:
            assert client.get("/readyz").status_code == 200
    finally:
        server.stop()
    print(f"{sent:,} requests")  # noqa: T201

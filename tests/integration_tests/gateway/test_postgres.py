"""The whole server on PostgreSQL: it is killed and goes on, the database crashes and is back."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.wire.api_keys import new_api_key
from langchain_art_server.gateway.keys.tenants import url_of
from langchain_art_server.storage.database import Database
from langchain_art_server.storage.schema import connect
from tests.integration_tests.gateway.test_readiness import await_readiness
from tests.support.hot_swap import train_once
from tests.support.live_server import HastyServer
from tests.support.postgres import Postgres


def nobody_else_may_have(url: str) -> None:
    with pytest.raises(ConfigError, match="Another server uses the database"):
        Database(url)


@pytest.mark.soak
def test_a_server_and_its_database_may_each_die(tmp_path: Path, postgres: Postgres) -> None:
    """Each tenant has a schema of its own in it."""
    url, key = postgres.database(), new_api_key()
    env = {"ART_API_KEY": key}
    server = HastyServer(tmp_path / "data", "--database-url", url, env=env).start()
    ask = {"model": server.policy, "max_tokens": 4, "messages": [{"role": "user", "content": "?"}]}
    keys: list[str] = []
    with server.http() as http, ArtClient(server.base_url, api_key=key) as administrator:
        train_once(http, 0)
        for count, tenant in enumerate(("ana-1", "bob"), 1):
            keys.append(administrator.create_key("one", tenant=tenant).key)
            with (
                ArtClient(server.base_url, api_key=keys[-1]) as client,
                server.http(keys[-1]) as own,
            ):
                client.create_policy(server.policy)
                for _ in range(count):
                    own.post("/v1/chat/completions", json=ask).raise_for_status()
                status = client.status()
            assert status.calls == count, tenant
            assert 0 < status.stored_bytes < 3_000_000
    nobody_else_may_have(url)

    server.kill()
    server.start()
    with ArtClient(server.base_url, api_key=key) as client:
        assert client.policy(server.policy).version == 1
        status = client.status()
        assert status.calls == status.trajectories == 8
        assert status.jobs == {"succeeded": 1}
    for count, one in enumerate(keys, 1):
        with ArtClient(server.base_url, api_key=one) as client:
            assert client.status().calls == count
    nobody_else_may_have(url_of(url, "ana-1") or "")
    with server.http() as http:
        train_once(http, 1)

    postgres.crash()
    with server.http() as http:
        for method, path, body in (
            ("POST", "/v1/chat/completions", ask),
            ("GET", "/v1/jobs", None),
        ):
            refused = http.request(method, path, json=body)
            assert refused.status_code == 503, refused.text
            assert int(refused.headers["retry-after"]) > 0
            assert "The store could not" in refused.json()["error"]["message"]
        answer = await_readiness(server, lambda answer: answer.status_code == 503)
        assert "cannot be written to or read" in answer.json()["reasons"]["store"]
        postgres.start()
        await_readiness(server, lambda answer: answer.json() == {"ready": True})
        kept = http.post("/v1/chat/completions", json=ask).raise_for_status().json()["id"]
        assert http.get(f"/v1/calls/{kept}").raise_for_status().json()["id"] == kept
        train_once(http, 2)
        jobs = http.get("/v1/jobs").json()["data"]
        assert len(jobs) == 3
        assert all(job["result"]["metrics"]["tokens_trained"] > 0 for job in jobs)
    nobody_else_may_have(url)
    server.stop()
    Database(url).close()  # whoever comes next may have it
    engine = connect(url)
    schemas = set(sa.inspect(engine).get_schema_names())
    engine.dispose()
    assert {"public", "tenant_ana_1", "tenant_bob"} <= schemas

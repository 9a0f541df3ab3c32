"""Two servers with disks of their own, one PostgreSQL and one bucket of S3: their adapters."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from langchain_art.client.sync_client import ArtClient
from langchain_art.wire.api_keys import new_api_key
from langchain_art_server.backends.models.adapter_files import (
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    check_files,
)
from langchain_art_server.backups.commands import Scrub, back_up, databases_of, restore
from tests.support.fleet_jobs import ended, make_policy, make_runs, order, routes_to, said, stopped
from tests.support.gateways import Gateway, Gateways
from tests.support.hot_swap import train_once
from tests.support.postgres import Postgres, programs
from tests.support.s3_server import S3Server


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, s3: S3Server
) -> Iterator[Gateways]:
    settings = "keep_checkpoints = 1000\nmax_policies = 1000\n"
    with Gateways(tmp_path_factory.mktemp("objects"), postgres, settings, s3=s3) as made:
        yield made


def copy_of(gateway: Gateway, policy: str, version: int) -> Path:
    return gateway.data_dir / "adapters" / policy / str(version)


def trained(fleet: Gateways, by: Gateway, policy: str, name: str) -> Any:
    """A job that succeeded; each server routes to its version."""
    job = ended(by, order(by, policy, make_runs([by], policy, name), f"{policy}-{name}"))
    assert job["state"] == "succeeded", job["error"]
    for gateway in fleet.all:
        routes_to(gateway, policy, f"{policy}@{job['result']['version']}")
    return job


def uploads(s3: S3Server, fleet: Gateways, policy: str, version: int) -> dict[str, bytes]:
    return s3.objects(f"{fleet.folder.name}/adapters/{policy}/{version}")


def until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_all_servers_have_the_same_bucket_and_each_its_own_disk(
    fleet: Gateways, s3: S3Server, tmp_path: Path
) -> None:
    env = {"STOP_FILE": str(fleet.stop_file)} | s3.environment
    (tmp_path / "fleet.toml").write_text(f"fleet = true\nadapters_url = '{s3.url('elsewhere')}'\n")
    for config, data_dir, words in (
        (tmp_path, tmp_path / "data", "another base model or adapters_url than this one: "),
        (fleet.folder, fleet.all[0].data_dir, "Another server uses"),
    ):
        args = ("--config", str(config / "fleet.toml"), "--database-url", fleet.url)
        assert words in Gateway(tmp_path, 2, data_dir, *args, env=env).refusal()


def test_what_one_server_trains_the_other_answers_with(fleet: Gateways, s3: S3Server) -> None:
    policy = make_policy(fleet, "shared")
    for step in (1, 2):
        one = fleet.all[step % 2]
        runs = make_runs([one], policy, str(step))
        job = ended(one, order(one, policy, runs, f"{policy}-{step}"))
        assert job["state"] == "succeeded", job["error"]
        for gateway in fleet.all:
            routes_to(gateway, policy, f"{policy}@{step}")
        answers = list[Any]()
        for gateway in fleet.all:
            answer = said(gateway, policy, temperature=0.0, max_tokens=12).json()
            with gateway.http() as http:
                answers.append(http.get(f"/v1/calls/{answer['id']}").json())
        assert answers[0]["version"] == answers[1]["version"] == step
        assert answers[0]["token_ids"] == answers[1]["token_ids"]
        assert answers[0]["logprobs"] == answers[1]["logprobs"], "the weights are the same"
    whole = [one for one in fleet.all if (copy_of(one, policy, 2) / OPTIMIZER_FILE).exists()]
    assert len(whole) == 1, "what is only served is downloaded without the optimizer's state"
    other = fleet.all[1 - fleet.all.index(whole[0])]
    with other.http() as http:
        assert http.get(f"/v1/policies/{policy}").json()["checkpoints"] == 3
        archive = http.get(f"/v1/policies/{policy}/checkpoints/2/adapter")
        assert (copy_of(whole[0], policy, 2) / WEIGHTS_FILE).read_bytes() in archive.content
        http.delete(f"/v1/policies/{policy}/checkpoints/1").raise_for_status()
    assert not uploads(s3, fleet, policy, 1)
    for gateway in fleet.all:
        until(lambda gateway=gateway: not copy_of(gateway, policy, 1).exists())
        assert said(gateway, f"{policy}@1").status_code == 404
        assert said(gateway, policy).json()["model"] == f"{policy}@2"
    job = trained(fleet, other, policy, "3")
    assert job["result"]["version"] == 3
    with fleet.all[0].http() as http:
        http.delete(f"/v1/policies/{policy}").raise_for_status()
    assert not s3.objects(f"{fleet.folder.name}/adapters/{policy}")
    for gateway in fleet.all:
        until(lambda gateway=gateway: not copy_of(gateway, policy, 3).exists())


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["killed", "late"])
def test_an_upload_that_was_cut_is_published_once(fleet: Gateways, s3: S3Server, fate: str) -> None:
    """The trainer stops in the middle of its upload, and is killed; or the other has published."""
    policy = make_policy(fleet, fate)
    runs = make_runs(fleet.all, policy, "1")
    fleet.stop_file.write_text("in the upload")
    job = order(fleet.all[0], policy, runs, policy)
    holder, other = stopped(fleet)
    cut = uploads(s3, fleet, policy, 1)
    assert cut and not any(name == "manifest.json" for name in cut)
    if fate == "killed":
        holder.kill()
    job = ended(other, job)
    assert job["state"] == "succeeded", job["error"]
    assert job["result"]["version"] == 1
    published = uploads(s3, fleet, policy, 1)
    assert len({name.partition("/")[0] for name in published}) == 2, "the manifest and its upload"
    if fate == "killed":
        holder.start()
    else:
        holder.thaw()
    routes_to(holder, policy, f"{policy}@1")
    job = trained(fleet, other, policy, "2")
    assert job["result"]["version"] == 2
    assert uploads(s3, fleet, policy, 1) == published, "nobody has written over it, or beside it"
    rows = fleet.rows("SELECT version FROM checkpoints WHERE policy = :p", p=policy)
    assert sorted(row.version for row in rows) == [0, 1, 2]
    for gateway in fleet.all:
        assert check_files(copy_of(gateway, policy, 1), (WEIGHTS_FILE,))["job"] is not None


@pytest.mark.slow
def test_while_the_store_does_not_answer_calls_go_on(fleet: Gateways, s3: S3Server) -> None:
    policy = make_policy(fleet, "silent")
    trained(fleet, fleet.all[0], policy, "1")
    trained(fleet, fleet.all[0], policy, "2")
    one, other = fleet.all
    other.stop()
    other.start()  # it has not loaded version 1
    shutil.rmtree(copy_of(other, policy, 1))
    runs = make_runs(fleet.all, policy, "3")
    with s3.frozen():
        refused, waiting, ends = list[Any](), list[threading.Thread](), list[float]()

        def download() -> Any:
            with other.http() as http:
                return http.get(f"/v1/policies/{policy}/checkpoints/1/adapter")

        def ask(what: Callable[[], Any]) -> None:
            refused.append(what())
            ends.append(time.monotonic())

        begun = time.monotonic()
        for _ in range(20):  # more than there are threads that wait for the store
            for what in (lambda: said(other, f"{policy}@1"), download):
                waiting.append(threading.Thread(target=ask, args=(what,)))
                waiting[-1].start()
        job = order(one, policy, runs, policy)
        took: list[float] = []
        while any(thread.is_alive() for thread in waiting):
            for gateway in fleet.all:
                asked = time.monotonic()
                assert said(gateway, policy).json()["model"] == f"{policy}@2"
                took.append(time.monotonic() - asked)
        first, last = min(ends) - begun, max(ends) - begun
        assert median(took) < first / 2, "calls of versions that are loaded wait for nobody"
        # Who comes after a failure waits anew. One after the other, they take 40 times as long.
        assert last < 20 * first, "who waits for the same hears the same"
        assert [answer.status_code for answer in refused] == [503] * len(waiting)
        assert int(refused[0].headers["Retry-After"]) > 0 and "object store" in refused[0].text
        job = ended(one, job)
        assert job["state"] == "failed" and job["retryable"], job
        assert "The object store s3://" in job["error"] and "Idempotency-Key" in job["error"]
        for gateway in fleet.all:
            with gateway.http() as http:
                assert http.get("/readyz").status_code == 200
                assert http.get("/status").status_code == http.get("/metrics").status_code == 200
    assert said(other, f"{policy}@1").status_code == 200
    job = ended(one, order(one, policy, runs, policy))
    assert job["state"] == "succeeded" and job["result"]["version"] == 3, job
    for gateway in fleet.all:
        routes_to(gateway, policy, f"{policy}@3")


@pytest.mark.slow
def test_a_backup_has_what_is_in_the_bucket(
    tmp_path: Path, postgres: Postgres, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a server on an empty bucket goes on from it, tenants too."""
    monkeypatch.setenv("PATH", f"{programs()}{os.pathsep}{os.environ['PATH']}")  # pg_dump's
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    servers_key, archive = new_api_key(), tmp_path / "backup.tar"
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    with Gateways(tmp_path / "before", postgres, api_key=servers_key, s3=s3) as made:
        one, other = made.all
        with ArtClient(one.base_url, api_key=servers_key) as administrator:
            key = administrator.create_key("one", tenant="ana").key
        one.api_key = other.api_key = key
        with other.http() as http:
            until(lambda: http.post("/v1/policies", json={"name": "own"}).status_code != 401)
            train_once(http, 0, "own")
        routes_to(one, "own", "own@1")
        right = said(one, "own", temperature=0.0, max_tokens=12).json()["choices"][0]["message"]
        tenants = s3.objects("before/tenants/ana/adapters/own")
        assert {name.partition("/")[0] for name in tenants} == {"0", "1"}
        places = list(databases_of(one.data_dir, made.url))
        assert len(places) == 2
        assert not [line for place, url in places for line in Scrub(place, url).run()]
        contents, damaged = back_up(one.data_dir, archive, made.url)
        assert not damaged
        assert contents.versions == {".": ["tiny@0"], "tenants/ana": ["own@0", "own@1"]}
        upload = next(name for name in tenants if name.endswith(OPTIMIZER_FILE))
        s3.put("before/tenants/ana/adapters/own", upload, b"changed")
        [line] = [line for place, url in places for line in Scrub(place, url).run()]
        assert "own@1 is damaged" in line and "roll back to one of [0]" in line
    after = Gateways(tmp_path / "after", postgres, api_key=servers_key, s3=s3)
    restore(archive, after.all[0].data_dir, after.url)
    # The bucket's place is the other database's.
    elsewhere = Gateways(tmp_path / "before", postgres, api_key=servers_key, s3=s3)
    said_so = elsewhere.all[0].refusal()
    assert "belong to another database" in said_so and "another prefix" in said_so
    server = after.all[0].start()
    try:
        server.api_key = key
        answer = said(server, "own", temperature=0.0, max_tokens=12).json()
        assert answer["model"] == "own@1" and answer["choices"][0]["message"] == right
        names = s3.objects("after/tenants/ana/adapters/own")
        assert {name.partition("/")[0] for name in names} == {"0", "1"}, "they are in the bucket"
        with server.http() as http:
            train_once(http, 1, "own")
    finally:
        server.stop()

"""No request crosses from one tenant to another: every route with every kind of key.

The routes are those of the OpenAPI document, and of the page; what each scope may is the table of
docs/team.md.
"""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_art import ArtClient
from langchain_art.cli.main import main
from langchain_art.cli.options import console
from langchain_art.errors import AuthenticationFailed, PermissionDenied, QuotaExceeded
from langchain_art.wire import KeyLimits, NewApiKey
from langchain_art.wire.api_keys import SCOPES, new_api_key
from langchain_art_server.gateway.keys.scopes import ADMINISTRATOR, OPEN, RULES
from langchain_art_server.storage.schema import connect
from langchain_art_server.storage.seals import update
from langchain_art_server.storage.tables import API_KEYS
from tests.support.hot_swap import train_once
from tests.support.live_server import ForkedServer
from tests.support.soak import share

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
#: Of the tenant "ana"; the other's are "bob".
RUN, POLICY = "swap-tiny-0-0", "tiny"


@dataclass
class Shared:
    """A server with two tenants, of which the first has trained; and keys of every kind."""

    server: ForkedServer
    keys: dict[str, str] = field(default_factory=dict[str, str])
    made: dict[str, NewApiKey] = field(default_factory=dict[str, NewApiKey])
    job: str = ""
    call: str = ""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))
    _transport: httpx.HTTPTransport = field(default_factory=lambda: httpx.HTTPTransport())
    _peers: itertools.count[int] = field(default_factory=lambda: itertools.count(16))

    def ask(
        self, key: str | None, method: str, path: str, body: Any = None, **headers: str
    ) -> httpx.Response:
        if key is not None:
            headers["Authorization"] = f"Bearer {self.keys.get(key, key)}"
        url = f"{self.server.root}{path}"
        return self.client.request(method, url, json=body, headers=headers)

    def ask_wrongly(self, key: str, method: str, path: str) -> httpx.Response:
        """From an address of its own: from the ninth on, wrong keys are answered slowly."""
        peer = next(self._peers)
        if peer % 8 == 0:
            self._transport.close()
            self._transport = httpx.HTTPTransport(local_address=f"127.0.0.{peer // 8}")
        headers = {"Authorization": f"Bearer {self.keys.get(key, key)}", "Host": "art"}
        request = httpx.Request(method, f"{self.server.root}{path}", headers=headers)
        answer = self._transport.handle_request(request)
        answer.read()
        return answer

    def art(self, key: str) -> ArtClient:
        return ArtClient(self.server.base_url, api_key=self.keys.get(key, key), patience=0)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    servers_key = new_api_key()
    data = tmp_path_factory.mktemp("tenants") / "data"
    server = ForkedServer(data, env={"ART_API_KEY": servers_key}).start()
    one = Shared(server, {"ART_API_KEY": servers_key, "wrong": new_api_key()})
    with one.art("ART_API_KEY") as administrator:

        def make(name: str, tenant: str, *scopes: Any, **more: Any) -> None:
            made = administrator.create_key(name, tenant=tenant, scopes=scopes, **more)
            one.made[name], one.keys[name] = made, made.key

        for scope in SCOPES:
            make(scope, "ana", scope)
            make(f"bob {scope}", "bob", scope)
        make("ana", "ana", *SCOPES)
        make("bob", "bob", *SCOPES)
        make("second administrator", "default", "admin")
        make("expired", "ana", *SCOPES, expires_at=time.time() + 1.0)
        make("revoked", "ana", *SCOPES)
        administrator.revoke_key(one.made["revoked"].id)
    with one.art("ana") as ana:
        ana.create_policy(POLICY)
    with server.http(one.keys["ana"]) as http:
        train_once(http, 0)
    one.job = one.ask("ana", "GET", "/v1/jobs").json()["data"][0]["id"]
    one.call = one.ask("ana", "GET", f"/v1/trajectories/{RUN}").json()["turns"][0]["call_id"]
    time.sleep(max(0.0, (one.made["expired"].expires_at or 0) - time.time()))
    yield one
    one.client.close()
    server.stop()


@pytest.fixture(scope="module")
def routes(shared: Shared) -> list[tuple[str, str]]:
    """Method and template of every route."""
    document = shared.ask("ana", "GET", "/openapi.json").json()
    found = [(m.upper(), path) for path, of in document["paths"].items() for m in of]
    assert len(found) > 30
    assert set(found) <= RULES.keys() | OPEN
    return sorted({*found, *RULES})


def filled(template: str, **values: str) -> str:
    """A path with ids, of which all that are not given are unknown."""
    return re.sub(
        r"\{(\w+)\}", lambda m: values.get(m[1], "7" if m[1] == "version" else "none"), template
    )


def documented() -> dict[tuple[str, str], set[str]]:
    """The table of docs/team.md: who may use each route."""
    text = (Path(__file__).parents[3] / "docs" / "team.md").read_text()
    rows = re.findall(r"^\| `(\w+) (/\S*)` \| (.*) \|$", text, re.MULTILINE)
    return {(method, path): set(who.split(", ")) for method, path, who in rows}


def test_the_documented_table_is_that_of_the_server() -> None:
    table = documented()
    public = {route: rule for route, rule in RULES.items() if not route[1].startswith("/page/")}
    assert table == {route: set(rule.allowed) for route, rule in public.items()}


def test_no_route_answers_without_a_key_that_holds(
    shared: Shared, routes: list[tuple[str, str]]
) -> None:
    for method, template in routes:
        path = filled(template)
        if (method, path) in OPEN:
            continue
        assert shared.ask(None, method, path).status_code == 401, (method, path)
        for key in ("wrong", "expired", "revoked"):
            answer = shared.ask_wrongly(key, method, path)
            assert answer.status_code == 401, (key, method, path)
            if method != "HEAD":
                code = json.loads(answer.content)["error"]["code"]
                assert code == "invalid_api_key"
    bare = {"Authorization": shared.keys["ana"]}  # without the word Bearer
    assert shared.client.get(f"{shared.server.root}/v1/models", headers=bare).status_code == 401
    assert "A wrong API key from 127.0.0." in shared.server.log.read_text()


def test_each_scope_opens_the_routes_of_the_table_and_no_others(
    shared: Shared, routes: list[tuple[str, str]]
) -> None:
    table = documented()
    for method, template in routes:
        wanted = table.get((method, template)) or set(
            RULES[method, template].allowed if (method, template) in RULES else ()
        )
        if (method, template) in OPEN or template == "/page/events":  # which has no end
            continue
        body = {} if method in ("POST", "PUT") else None
        for scope in (*SCOPES, "ART_API_KEY", "second administrator"):
            answer = shared.ask(scope, method, filled(template), body)
            held = {"admin", ADMINISTRATOR} if scope not in SCOPES else {scope}
            held |= set(SCOPES) if scope == "ART_API_KEY" else set()
            place = (scope, method, template, answer.text[:300])
            if wanted & held:
                assert answer.status_code in (200, 400, 404, 409), place
            else:
                assert answer.status_code == 403, place
                assert answer.json()["error"]["code"] == "permission_denied"


def test_another_method_or_path_is_refused_with_and_without_a_key(
    shared: Shared, routes: list[tuple[str, str]]
) -> None:
    known = {(m, t) for m, t in routes} | OPEN
    keys = itertools.cycle([("infer", "ana")] if share() else [("infer",), ("ana",)])
    for template in sorted({template for _, template in routes}):
        for method in METHODS:
            if (method, template) in known or (method == "HEAD" and ("GET", template) in known):
                continue
            alive = template in ("/healthz", "/readyz")  # which ask for no key
            for key in (None, *next(keys)):
                answer = shared.ask(key, method, filled(template))
                status = 401 if key is None and not alive else 405
                assert answer.status_code == status, (key, method, template, answer.text)
    for path in ("/v1/keys%0A", "/v1/log%0a", "/v1/nowhere", "/docs", "//v1/keys"):
        assert shared.ask("infer", "GET", path).status_code == 404, path
        assert shared.ask(None, "GET", path).status_code == 401, path


def test_ids_of_another_tenant_answer_as_unknown_ones_do(
    shared: Shared, routes: list[tuple[str, str]]
) -> None:
    """By every route that has an id in its path; the version is one that there is."""
    mine = {"trajectory_id": RUN, "name": POLICY, "job_id": shared.job, "call_id": shared.call}
    mine |= {"version": "1", "key_id": shared.made["ana"].id}
    mine |= {"batch": "anas", "rollout_id": "anas-1", "sha256": "a" * 64}
    put = {"batch": "anas", "rollout": "agent:run", "rollouts": [{"id": "anas-1"}]}
    assert shared.ask("ana", "POST", "/v1/rollouts", put).json() == {"new": 1}
    nobodys = {"name": "tinx", "version": "1", "batch": "anax", "rollout_id": "anas-x"}
    nobodys["sha256"] = "b" * 64
    nobodys |= {name: f"{mine[name][:-1]}~" for name in ("trajectory_id", "job_id", "call_id")}
    asked = 0
    for method, template in routes:
        names = re.findall(r"\{(\w+)\}", template)
        if not names or ADMINISTRATOR in RULES[method, template].allowed:
            continue
        body = {"version": 0} if template.endswith("rollback") else None
        body = {"reward": 1.0} if template.endswith("reward") else body
        body = {"trajectory_id": "t", "error": "no"} if template.endswith("complete") else body
        body = {} if template.endswith("take") else body
        theirs = shared.ask("bob", method, filled(template, **mine), body)
        unknown = shared.ask("bob", method, filled(template, **nobodys), body)
        said, expected = theirs.text, unknown.text
        for name in names:
            said = said.replace(mine[name], "ID")
            expected = expected.replace(nobodys[name], "ID")
        place = (method, template, theirs.text[:300], unknown.text[:300])
        assert theirs.status_code == unknown.status_code, place
        assert theirs.status_code == 404 or said == "null", place
        assert said == expected, place
        asked += 1
    assert asked > 20
    kept = shared.ask("ana", "GET", f"/v1/trajectories/{RUN}").json()
    assert kept["reward"] == 0.0  # nothing was changed by it
    assert shared.ask("ana", "GET", "/v1/rollouts/batches/anas").json()["queued"] == 1
    asked_for = {"worker": "w", "rollout": "agent:run", "slots": 1, "free": 1}
    assert shared.ask("bob", "POST", "/v1/rollouts/lease", asked_for).json()["leases"] == []
    assert shared.ask("bob", "GET", "/status").json()["rollouts"] == {}
    assert shared.ask("ana", "GET", f"/v1/policies/{POLICY}").json()["version"] == 1


def test_lists_and_bodies_reach_nothing_of_another_tenant(shared: Shared) -> None:
    hidden = (RUN, shared.job, shared.call, f"{POLICY}@1")
    for path in (
        *("/v1/models", "/v1/policies", "/v1/trajectories", "/v1/reviews", "/v1/jobs", "/status"),
        *("/page/overview", "/page/jobs", "/page/runs", "/page/open-runs", "/page/run-names"),
        *("/page/evaluations", "/page/review-queue", f"/v1/jobs?policy={POLICY}"),
        f"/page/runs?policy={POLICY}",
    ):
        own, others = (shared.ask(key, "GET", path) for key in ("ana", "bob"))
        assert own.status_code == others.status_code == 200, path
        for name in hidden:
            assert name not in others.text, (path, name)
    for after in (f"/v1/trajectories?after={RUN}", f"/v1/jobs?after={shared.job}"):
        assert shared.ask("bob", "GET", after).status_code == 400
    assert shared.ask("bob", "GET", "/v1/log").status_code == 403

    chat = {"max_tokens": 2, "messages": [{"role": "user", "content": "When?"}]}
    path = "/v1/chat/completions"
    for model in (POLICY, f"{POLICY}@1", f"ana/{POLICY}@1"):
        refused = shared.ask("bob", "POST", path, chat | {"model": model})
        assert refused.status_code == 404 and "ana" not in refused.text.replace(model, "")
    review = {"source": "s", "id": "1", "trajectory": RUN, "name": "human_reward", "at": 1.0}
    review |= {"kind": "score", "value": 1.0}
    kept = shared.ask("bob", "PUT", "/v1/reviews", {"reviews": [review]}).json()
    assert kept["new"] == 0 and kept["refused"][0]["reason"] == "unknown_trajectory"
    effect = shared.ask("bob", "POST", "/page/review-effect", review)
    assert effect.status_code == 404
    # The same names are free, and stay apart: policy, key of a job, tag, run.
    made = shared.ask("bob", "POST", "/v1/policies", {"name": POLICY})
    assert made.json()["version"] == 0
    headers = {"Idempotency-Key": "swap-tiny-0"}
    wanted = {"policy": POLICY, "groups": [[RUN]]}
    assert shared.ask("bob", "POST", "/v1/train", wanted, **headers).status_code == 404
    tagged = chat | {"model": POLICY, "art": {"trajectory_id": RUN}}
    answer = shared.ask("bob", "POST", path, tagged)
    assert answer.json()["model"] == f"{POLICY}@0"
    assert shared.ask("ana", "POST", path, chat | {"model": POLICY}).json()["model"] == "tiny@1"
    run = shared.ask("bob", "PUT", f"/v1/trajectories/{RUN}/reward", {"reward": 0.25}).json()
    assert [turn["call_id"] for turn in run["turns"]] == [answer.json()["id"]]
    assert shared.ask("ana", "GET", f"/v1/trajectories/{RUN}").json()["reward"] == 0.0
    status = shared.ask("bob", "GET", "/status").json()
    assert (status["calls"], status["trajectories"], status["jobs"]) == (1, 1, {})


def test_the_page_shows_what_the_tenant_of_its_login_has(shared: Shared) -> None:
    @contextmanager
    def logged_in(key: str) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=shared.server.root) as browser:
            answer = browser.post("/page/login", json={"key": shared.keys[key]})
            assert answer.status_code == 200, answer.text
            yield browser

    with logged_in("review") as ana, logged_in("bob review") as bob:
        assert RUN in ana.get("/page/runs").text
        assert "swap-tiny" not in bob.get("/page/runs").text.replace(RUN, "")
        assert ana.get("/v1/keys").status_code == 403
        token = {"X-ART-Token": ana.get("/page/session").json()["token"]}
        assert ana.delete(f"/v1/trajectories/{RUN}", headers=token).status_code == 403
    refused = shared.client.post(
        f"{shared.server.root}/page/login", json={"key": shared.keys["infer"]}
    )
    assert refused.status_code == 403
    with shared.art("ART_API_KEY") as administrator:
        made = administrator.create_key("page", tenant="ana", scopes=["review"])
        shared.keys["page"] = made.key
        with logged_in("page") as browser:
            assert browser.get("/page/runs").status_code == 200
            administrator.revoke_key(made.id)
            assert browser.get("/page/runs").status_code == 401
            assert browser.get("/").status_code == 200  # to log in again


def test_limits_are_answered_with_the_headers_of_openai(shared: Shared) -> None:
    ask = {"model": "base_model", "max_tokens": 2, "messages": [{"role": "user", "content": "?"}]}
    path = "/v1/chat/completions"
    limits = {"calls": KeyLimits(calls_per_minute=2), "tokens": KeyLimits(tokens_per_minute=5)}
    limits |= {"calls at once": KeyLimits(concurrent_calls=1), "bytes": KeyLimits(stored_bytes=1)}
    with shared.art("ART_API_KEY") as administrator:
        for name, limit in limits.items():
            made = administrator.create_key(name, tenant="carl", limits=limit)
            shared.keys[name] = made.key
    first, second, third = (shared.ask("calls", "POST", path, ask) for _ in range(3))
    assert [one.status_code for one in (first, second, third)] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert re.fullmatch(r"(\d+m)?\d+s", third.headers["x-ratelimit-reset-requests"])
    assert shared.ask("calls", "GET", "/v1/models").status_code == 200  # only calls are counted
    many = shared.ask("calls at once", "POST", path, ask | {"n": 2})
    assert many.status_code == 400 and "so that it can never run" in many.text
    assert shared.ask("calls at once", "POST", path, ask).status_code == 200
    streamed = shared.ask("tokens", "POST", path, ask | {"stream": True})
    assert streamed.headers["x-ratelimit-limit-tokens"] == "5"
    assert shared.ask("tokens", "POST", path, ask).status_code == 429  # the prompt alone had more
    with shared.art("bytes") as full, pytest.raises(QuotaExceeded, match="stored_bytes is 1"):
        full.create_policy("p")
    assert shared.ask("bytes", "GET", "/v1/policies").status_code == 200


def test_tokens_of_streams_that_their_reader_left_are_counted(shared: Shared) -> None:
    with shared.art("ART_API_KEY") as administrator:
        limits = KeyLimits(tokens_per_minute=40)
        key = administrator.create_key("leaves", tenant="carl", limits=limits).key
    body: dict[str, Any] = {"model": "base_model", "max_tokens": 400, "stream": True}
    body["messages"] = [{"role": "user", "content": "Tell me a long story"}]
    url, seen = f"{shared.server.root}/v1/chat/completions", list[int]()
    for seed in range(6):
        headers = {"Authorization": f"Bearer {key}"}
        with shared.client.stream("POST", url, json=body | {"seed": seed}, headers=headers) as sent:
            seen.append(sent.status_code)
            for _ in itertools.islice(sent.iter_lines(), 40):
                pass
        time.sleep(0.2)
    assert (seen[0], seen[-1]) == (200, 429)


def test_a_key_that_another_process_revoked_is_refused_within_a_second(shared: Shared) -> None:
    with shared.art("ART_API_KEY") as administrator:
        made = administrator.create_key("soon gone", tenant="ana")
    assert shared.ask(made.key, "GET", "/v1/policies").status_code == 200
    engine = connect(f"sqlite:///{shared.server.data_dir / 'art.sqlite3'}")
    with engine.begin() as connection:
        update(connection, API_KEYS, API_KEYS.c.id == made.id, {"revoked_at": time.time()})
    engine.dispose()
    time.sleep(1.0)
    assert shared.ask(made.key, "GET", "/v1/policies").status_code == 401


def test_keys_are_made_listed_and_revoked_at_the_command_line(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ART_BASE_URL", shared.server.base_url)
    monkeypatch.setenv("ART_API_KEY", shared.keys["ART_API_KEY"])
    monkeypatch.setattr(console, "width", 300)  # it may have been made by an earlier test

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said.out

    asked = ("--tenant", "ana", "--scope", "infer", "--expires", "30d", "--calls-per-minute", "60")
    key = run("create", "by hand", *asked).strip()
    shared.keys["by hand"] = key
    assert re.fullmatch(r"sk-art-[\w-]{43}", key)  # and nothing else on standard output
    assert shared.ask(key, "GET", "/v1/models").status_code == 200
    [made] = [one for one in json.loads(run("list", "--json")) if one["name"] == "by hand"]
    assert made["scopes"] == ["infer"] and made["limits"]["calls_per_minute"] == 60
    assert time.time() + 29 * 86400 < made["expires_at"] <= time.time() + 30 * 86400
    listed = run("list")
    assert made["id"] in listed and "calls_per_minute 60" in listed and key not in listed
    assert "is revoked" in run("revoke", made["id"])
    assert shared.ask(key, "GET", "/v1/models").status_code == 401
    assert f"{made['id']} by hand" in run("log")
    for wrong in (("--scope", "all"), ("--expires", "soon"), ("--tenant", "../x")):
        with pytest.raises(SystemExit) as ended:
            main(["keys", "create", "x", *wrong])
        assert ended.value.code == 1 and "expected" in capsys.readouterr().err


def test_the_log_says_who_did_what(shared: Shared) -> None:
    with shared.art("admin") as ana:
        ana.create_policy("gone")
        ana.rollback(POLICY, 0)
        ana.delete_checkpoint(POLICY, 1)
        ana.delete_policy("gone")
        ana.delete_trajectory("swap-tiny-0-7")
        with pytest.raises(PermissionDenied):
            ana.actions()
    review = {"source": "s", "id": "1", "trajectory": RUN, "name": "human_reward", "at": 1.0}
    review |= {"kind": "score", "value": 1.0}
    assert shared.ask("review", "PUT", "/v1/reviews", {"reviews": [review]}).json()["new"] == 1
    with shared.art("ART_API_KEY") as administrator:
        found = administrator.actions(None)
        listed = {one.id: one for one in administrator.api_keys()}
    ids = {name: made.id for name, made in shared.made.items()}
    done = {(one.tenant, one.key, one.action, one.subject) for one in found}
    for who, action, subject in (
        ("ana", "trained", f"{POLICY} by {shared.job}"),
        ("admin", "rolled_back", f"{POLICY}@0"),
        ("admin", "deleted_version", f"{POLICY}@1"),
        ("admin", "deleted_policy", "gone"),
        ("admin", "deleted_run", "swap-tiny-0-7"),
        ("review", "reviewed", RUN),
    ):
        assert ("ana", ids[who], action, subject) in done, (action, subject)
    made, revoked = f"{ids['revoked']} revoked", listed[ids["revoked"]]
    assert ("ana", "ART_API_KEY", "made_key", made) in done
    assert ("ana", "ART_API_KEY", "revoked_key", made) in done
    assert revoked.revoked_at is not None and listed[ids["ana"]].revoked_at is None
    numbers = [one.number for one in found]
    assert numbers == sorted(numbers, reverse=True)


def test_no_key_is_in_a_file_or_in_the_log(shared: Shared) -> None:
    with sqlite3.connect(shared.server.data_dir / "art.sqlite3") as connection:
        connection.execute("PRAGMA wal_checkpoint(FULL)")
    files = [path for path in shared.server.data_dir.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in (*files, shared.server.log):
        content = path.read_bytes()
        for name, key in shared.keys.items():
            assert key.encode() not in content, (path, name)
            assert key.removeprefix("sk-art-").encode() not in content, (path, name)


def test_tenants_go_on_after_a_restart_and_not_without_the_servers_key(shared: Shared) -> None:
    with shared.art("ana") as ana:
        before = ana.checkpoints(POLICY)
    shared.server.stop()
    without = ForkedServer(shared.server.data_dir)
    assert "API keys that are not revoked" in without.refusal()
    shared.server.start()
    with shared.art("ana") as ana:
        assert ana.checkpoints(POLICY) == before and before
    with shared.art("revoked") as gone, pytest.raises(AuthenticationFailed, match="was revoked"):
        gone.policies()

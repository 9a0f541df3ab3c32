"""The stub of Langfuse as the real SDK meets it: what it keeps, gives back, and how it fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langfuse import Langfuse
from langfuse.api.core.api_error import ApiError
from opentelemetry.sdk.trace import TracerProvider

from tests.support.langfuse_server import LangfuseServer


@pytest.fixture
def langfuse() -> Iterator[LangfuseServer]:
    with LangfuseServer() as server:
        yield server


def sdk(server: LangfuseServer) -> Langfuse:
    public, secret = server.keys
    return Langfuse(
        base_url=server.url,
        public_key=public,
        secret_key=secret,
        tracer_provider=TracerProvider(),
        timeout=2,
    )


def test_what_the_sdk_sends_comes_back_as_its_own_models(langfuse: LangfuseServer) -> None:
    client = sdk(langfuse)
    langfuse.refuses = lambda score: "not this one" if score.name == "bad" else None
    trace = client.create_trace_id(seed="one")
    with client.start_as_current_observation(
        as_type="generation", name="writer", trace_context={"trace_id": trace}, model="m@3"
    ) as call:
        call.update(
            input=[{"role": "user", "content": "hi"}],
            output={"role": "assistant", "content": "ho"},
            metadata={"call_id": "chatcmpl-1", "long": "x" * 300},
            usage_details={"input": 1, "output": 2, "total": 3},
        )
    client.create_score(name="reward", value=0.5, trace_id=trace, score_id="s-1")
    client.create_score(name="bad", value=0.5, trace_id=trace)
    client.flush()

    wanted = json.dumps(
        [{"type": "stringOptions", "column": "traceId", "operator": "any of", "value": [trace]}]
    )
    read: Any = client.api.observations.get_many
    [one] = read(filter=wanted, fields="core,basic,io,metadata,model,usage").data
    assert (one.name, one.type, one.model, one.is_root_observation) == (
        "writer",
        "GENERATION",
        "m@3",
        True,
    )
    assert json.loads(one.input) == [{"role": "user", "content": "hi"}]
    assert one.metadata["call_id"] == "chatcmpl-1"
    assert one.metadata["long"] == "x" * 200  # cut, unless it is asked for by its key
    [whole] = read(filter=wanted, fields="metadata", expand_metadata="long").data
    assert whole.metadata["long"] == "x" * 300

    human = langfuse.annotate(trace, "human_reward", 1.0, author="ann", comment="good")
    scores: Any = client.api.scores.get_many
    found = {one.name: one for one in scores(fields="details,subject,annotation").data}
    assert set(found) == {"reward", "human_reward"}  # `bad` was refused with 207
    assert found["human_reward"].author_user_id == "ann"
    assert found["human_reward"].subject.id == trace
    first = scores(limit=1)
    second = scores(limit=1, cursor=first.meta.cursor)
    assert {first.data[0].id, second.data[0].id} == {human, "s-1"}
    assert second.meta.cursor is None
    for refused in ({"limit": 101}, {"fields": "nonsense"}, {"observation_id": "o"}):
        with pytest.raises(ApiError) as error:
            scores(**refused)
        assert error.value.status_code == 400

    langfuse.visible_after = 3600.0
    langfuse.annotate(trace, "late", 1.0)
    assert not scores(name="late").data
    langfuse.visible_after = 0.0
    assert scores(name="late").data


def test_a_span_that_is_sent_again_is_there_twice_until_it_is_merged(
    langfuse: LangfuseServer,
) -> None:
    client = sdk(langfuse)
    with client.start_as_current_observation(name="once"):
        pass
    client.flush()
    langfuse.spans *= 2
    assert len(client.api.observations.get_many().data) == 2
    assert list(langfuse.duplicates().values()) == [2]
    langfuse.merge()
    assert len(client.api.observations.get_many().data) == 1


def test_an_annotation_queue_has_the_items_that_it_was_given(langfuse: LangfuseServer) -> None:
    api: Any = sdk(langfuse).api
    config = api.score_configs.create(
        name="human_reward", data_type="NUMERIC", min_value=0, max_value=1
    )
    queue = api.annotation_queues.create_queue(name="review", score_config_ids=[config.id])
    api.annotation_queues.create_queue_item(queue.id, object_id="t-1", object_type="TRACE")
    langfuse.annotate("t-1", "human_reward", 1.0, queue=queue.id)
    [item] = api.annotation_queues.list_queue_items(queue.id).data
    assert (item.object_id, item.status) == ("t-1", "COMPLETED")
    with pytest.raises(Exception, match="expected 0 to 1"):
        langfuse.annotate("t-1", "human_reward", 7.0)


def test_it_fails_as_it_is_told_and_recovers(langfuse: LangfuseServer) -> None:
    def ask(**options: Any) -> httpx.Response:
        return httpx.get(f"{langfuse.url}/api/public/health", auth=langfuse.keys, **options)

    assert ask().status_code == 200
    assert httpx.get(f"{langfuse.url}/api/public/health").status_code == 401
    for status in ("500", "429", "401"):
        langfuse.fault = status  # pyright: ignore[reportAttributeAccessIssue]
        assert ask().status_code == int(status)
    langfuse.fault = "hang"
    with pytest.raises(httpx.ReadTimeout):
        ask(timeout=0.2)
    langfuse.fault, langfuse.slow = "slow", 0.3
    began = time.monotonic()
    assert ask().status_code == 200 and time.monotonic() - began >= 0.3
    langfuse.fault = "refused"
    with pytest.raises(httpx.ConnectError):
        ask()
    langfuse.fault = "die"
    score = [{"name": "kept", "value": 1, "traceId": "t"}]
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{langfuse.url}/api/public/scores", auth=langfuse.keys, json=score)
    assert [one.name for one in langfuse.scores.values()] == ["kept"]
    with pytest.raises(httpx.ConnectError):
        ask()
    langfuse.fault = None
    assert ask().status_code == 200


def test_what_has_seen_it_die_is_refused_and_may_start_it_again(langfuse: LangfuseServer) -> None:
    url = f"{langfuse.url}/api/public"
    for number in range(30):
        langfuse.fault = "die"
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}/scores", auth=langfuse.keys, json=[])
        if number % 2:
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health", auth=langfuse.keys)
        langfuse.fault = None
        assert httpx.get(f"{url}/health", auth=langfuse.keys).status_code == 200


def test_what_is_deleted_is_listed_until_the_queue_has_done_it(langfuse: LangfuseServer) -> None:
    api: Any = sdk(langfuse).api
    first, second = (langfuse.annotate("t-1", name, 1.0) for name in ("one", "two"))
    langfuse.deleted_after = 0.2
    url = f"{langfuse.url}/api/public"
    assert (
        httpx.delete(f"{url}/scores/{first}", auth=langfuse.keys).status_code == 202
    )  # unknown ones, too
    assert httpx.delete(f"{url}/scores/nothing", auth=langfuse.keys).status_code == 202
    assert {one.id for one in api.scores.get_many().data} == {first, second}
    time.sleep(0.25)
    assert [one.id for one in api.scores.get_many().data] == [second]
    langfuse.deleted_after = 0.0
    api.trace.delete("t-1")
    assert not api.scores.get_many().data and not langfuse.scores


def test_a_score_that_is_sent_again_keeps_when_it_was_made(langfuse: LangfuseServer) -> None:
    score = {
        "id": "s",
        "name": "n",
        "value": 1,
        "traceId": "t",
        "timestamp": "2026-11-20T10:00:00Z",
    }
    api: Any = sdk(langfuse).api
    for value in (1, 0):
        url = f"{langfuse.url}/api/public/scores"
        httpx.post(url, auth=langfuse.keys, json=[score | {"value": value}]).raise_for_status()
    [one] = api.scores.get_many().data
    assert (one.value, one.created_at < one.updated_at) == (0, True)


def test_an_old_server_takes_single_scores_and_calls_what_is_prefilled_a_programs() -> None:
    with LangfuseServer(version="4.16.0") as server:
        api: Any = sdk(server).api
        config = api.score_configs.create(name="n", data_type="NUMERIC")
        score = {"name": "n", "value": 1, "traceId": "t", "source": "ANNOTATION"}
        score |= {"configId": config.id}
        url = f"{server.url}/api/public/scores"
        assert httpx.post(url, auth=server.keys, json=[score]).status_code == 400
        assert httpx.post(url, auth=server.keys, json=score).status_code == 200
        [one] = api.scores.get_many().data
        assert one.source == "API"

"""The stub of Langfuse as the real SDK meets it: what it keeps, gives back, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langfuse.api.core.api_error import ApiError

from tests.support.langfuse_server import LangfuseServer


@pytest.fixture
def langfuse() -> Iterator[LangfuseServer]:
    with LangfuseServer() as server:
        yield server


def test_what_the_sdk_sends_comes_back_as_its_own_models(langfuse: LangfuseServer) -> None:
    client = langfuse.client(timeout=2)
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

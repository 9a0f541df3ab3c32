"""The embedded sampler: replies that must follow a JSON schema or call a tool."""

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import InvalidRequest
from tests.support.tiny_models import CLOCK, WEATHER, LocalSampler, ask


@pytest.fixture(scope="module")
def sampler(model: Path) -> LocalSampler:
    """One for all tests: each has a compiler's process."""
    return LocalSampler(model)


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["mail", "team"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}


def test_a_json_schema_is_followed(sampler: LocalSampler) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    free, *replies = sampler.chat(
        ask(seed=1), *(ask(seed=i, response_format=wanted, max_tokens=200) for i in range(12))
    )
    for reply in replies:
        value = json.loads(reply.content or "")
        assert value.keys() == {"kind", "count", "tags"}
        assert value["kind"] in ("mail", "team")
        assert 0 <= value["count"] <= 99
        assert all(len(tag) <= 4 for tag in value["tags"])
        assert len(value["tags"]) <= 2
        assert reply.finish_reason == "stop"
        assert reply.excluded_because is None
        # Under the masked distribution a forced token is certain.
        assert max(reply.logprobs) == 0.0
        assert min(reply.logprobs) > float("-inf")
    assert len({reply.content for reply in replies}) > 3
    assert free.excluded_because is None


def test_a_schema_has_no_properties_but_those_it_names(sampler: LocalSampler) -> None:
    """Whatever they are called: names of JSON schema's own are names here."""
    part = {"type": "object", "properties": {"enum": {"type": "boolean"}}, "required": ["enum"]}
    some = {"type": "array", "items": part, "minItems": 1, "maxItems": 1}
    schema = {"type": "object", "properties": {"properties": some, "c": {"type": "boolean"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    replies = sampler.chat(
        *(ask(seed=i, response_format=wanted, max_tokens=200) for i in range(12))
    )
    values = [json.loads(reply.content or "") for reply in replies]
    assert all(value.keys() <= {"properties", "c"} for value in values)
    inner = [one for value in values for one in value.get("properties", ())]
    assert inner and all(one.keys() == {"enum"} for one in inner)
    assert any("properties" not in value for value in values)


def test_json_object_gives_an_object(sampler: LocalSampler) -> None:
    replies = sampler.chat(
        *(ask(seed=i, response_format={"type": "json_object"}, max_tokens=300) for i in range(6))
    )
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(reply.content or ""), dict) for reply in ended)


def test_required_tool_calls_follow_the_tools_schemas(sampler: LocalSampler) -> None:
    replies = sampler.chat(
        *(
            ask(seed=i, tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=300)
            for i in range(8)
        )
    )
    seen = set()
    for reply in replies:
        assert reply.tool_calls
        assert reply.excluded_because is None
        for call in reply.tool_calls:
            arguments = json.loads(call["function"]["arguments"])
            seen.add(call["function"]["name"])
            if call["function"]["name"] == "weather":
                assert arguments.keys() == {"city", "days"}
                assert 1 <= arguments["days"] <= 9
            else:
                assert arguments == {}
    assert seen == {"weather", "clock"}


def test_a_named_tool_is_called_once(sampler: LocalSampler) -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    (reply,) = sampler.chat(ask(tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=200))
    assert [call["function"]["name"] for call in reply.tool_calls] == ["clock"]
    assert (reply.content, reply.finish_reason) == (None, "tool_calls")


def _inside(schema: dict[str, Any]) -> dict[str, Any]:
    """A request for an object with this schema in a field of a field."""
    fields = {"tags": schema, "tag": {"type": "string"}}
    mail = {"type": "object", "properties": fields}
    whole = {"type": "object", "properties": {"mail": mail, "kind": {"type": "string"}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": whole}}}


PATTERNS = [{"type": "string", "pattern": f"^(.*[a-m]){{{n}}}.*$"} for n in range(4, 24)]


@pytest.mark.wall_clock  # seconds of this process's CPU: 0.2; the compiler's own would be minutes
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"const": -(2**63)}, "ended the compiler|takes more than"),
        (
            {"type": "object", "properties": {"a": {"enum": [1 - 2**63]}}, "required": ["a"]},
            "ended|takes",
        ),
        ({"allOf": PATTERNS}, "takes more than|too|limit|Unable to determine"),
        ({"enum": list(range(200_000))}, "schemas of .* characters, expected at most 262144"),
        ({"$ref": "#"}, "No grammar can be made"),
        (
            functools.reduce(lambda inner, _: {"items": inner}, range(80), {"type": "null"}),
            "nested deeper than 64 levels",
        ),
    ],
    ids=["const", "enum of one", "allOf", "long enum", "own reference", "deep"],
)
def test_a_schema_that_harms_the_compiler_is_refused_and_harms_nobody(
    sampler: LocalSampler, schema: dict[str, Any], problem: str
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    hostile = sampler.send(ask(response_format=wanted, max_tokens=4))
    (reply,) = sampler.chat(ask(seed=1))
    assert reply.token_ids
    begun = time.process_time()
    with pytest.raises(InvalidRequest, match=problem):
        sampler.reply(hostile)
    with pytest.raises(InvalidRequest, match=problem):  # known by now
        sampler.chat(ask(response_format=wanted, max_tokens=4))
    assert time.process_time() - begun < 5
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    (reply,) = sampler.chat(ask(response_format=wanted, max_tokens=200))
    assert json.loads(reply.content or "").keys() == {"kind", "count", "tags"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "strnig"}},
                }
            },
            r"JSON schema: Invalid type: strnig\. Simplify",
        ),
        *(
            (_inside(schema), rf"JSON schema: {problem}.* \(at mail\.tags\)\. Simplify")
            for schema, problem in (
                ({"type": "array", "uniqueItems": True}, "Unimplemented keys.*uniqueItems"),
                ({"type": "string", "pattern": "(?=a)b"}, "regex parse error.*look-around"),
            )
        ),
        ({"response_format": {"type": "poem"}}, "'poem'"),
        ({"tool_choice": "required"}, "no tools"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "names 'x'",
        ),
    ],
)
def test_a_form_that_can_not_be_had_is_refused(
    sampler: LocalSampler, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        sampler.chat(ask(**options))

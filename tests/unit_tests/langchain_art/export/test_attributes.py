import json
from typing import Any

import pytest
from langfuse._client.attributes import LangfuseOtelSpanAttributes
from langfuse.api import CreateScoreRequest

from langchain_art.export import ids
from langchain_art.export.attributes import gen_ai_message, scores_of
from langchain_art.export.otel_spans import otel_spans
from langchain_art.export.records import Experiment, ExportBatch
from langchain_art.wire.redaction import REDACTED, Redactor
from tests.unit_tests.langchain_art.export.examples import SECRET, exported

CALLED = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}


def sent(*, langfuse: bool, **labels: Any) -> list[Any]:
    return otel_spans(exported(**labels), Redactor(), langfuse=langfuse)


def test_langfuse_is_given_whole_prompts_with_their_tools_and_no_secret() -> None:
    root, _, first, _, second = sent(langfuse=True)
    assert root.parent is None and root.name == "mail"
    assert f"{root.context.trace_id:032x}" == ids.trace_id("run-1")
    assert f"{first.context.span_id:016x}" == ids.call_observation_id("run-1", "run-1-a")
    told = dict(second.attributes)
    messages = json.loads(told["langfuse.observation.input"])
    assert messages == [
        {"role": "user", "content": f"When? My key is {REDACTED}"},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c", "content": "Monday"},
    ]
    assert json.loads(told["langfuse.observation.output"])["content"] == "On Monday."
    asked = json.loads(first.attributes["langfuse.observation.input"])
    assert asked["messages"] == messages[:1] and asked["tools"][0]["function"]["name"] == "search"
    usage = json.loads(first.attributes["langfuse.observation.usage_details"])
    assert usage == {"input": 7, "output": 2, "total": 9}
    assert json.loads(told["langfuse.observation.metadata.excluded_because"]) == "calls.frozen"
    assert "langfuse.observation.metadata.excluded_because" not in first.attributes
    answer = json.loads(root.attributes["langfuse.observation.output"])
    assert answer == {"messages": [{"role": "assistant", "content": "On Monday."}]}
    assert not any(SECRET in str(span.attributes) for span in (root, first, second))
    assert "hunter22" not in str(root.attributes)


def test_every_attribute_is_one_that_langfuse_reads() -> None:
    known = {v for k, v in vars(LangfuseOtelSpanAttributes).items() if k.isupper()}
    experiment = Experiment(id="e", name="mail@3")
    for span in sent(langfuse=True, experiment=experiment, tags=("a",), user="ann"):
        for name in span.attributes:
            bare = name.partition(".metadata.")[0] + (".metadata" if ".metadata." in name else "")
            assert bare in known or name.startswith("gen_ai."), name
        assert span.attributes["langfuse.experiment.id"] == "e"
        assert span.attributes["langfuse.version"] == "mail@3"
        assert span.attributes["session.id"] == "fit/step-1/g"


def test_another_backend_is_given_the_conventions_alone() -> None:
    root, _, first, _, second = sent(langfuse=False)
    for span in (root, first, second):
        assert not any(name.startswith("langfuse.") for name in span.attributes)
        assert SECRET not in str(span.attributes)
    assert first.attributes["gen_ai.usage.input_tokens"] == 7
    assert first.attributes["gen_ai.response.model"] == "mail@3"
    (said,) = json.loads(second.attributes["gen_ai.output.messages"])
    assert said == {"role": "assistant", "parts": [{"type": "text", "content": "On Monday."}]}
    assert len(json.loads(second.attributes["gen_ai.input.messages"])) == 3
    scores = {one.attributes["gen_ai.evaluation.name"]: one.attributes for one in root.events}
    assert scores["ruler"]["gen_ai.evaluation.explanation"] == "short and right"
    assert scores["reward"]["gen_ai.evaluation.score.value"] == 1.0


@pytest.mark.parametrize("langfuse", [True, False])
def test_a_generation_says_how_it_was_sampled(langfuse: bool) -> None:
    run = exported()
    known = {"temperature": 0.5, "max_tokens": 4, "stop": ["\n"]}
    spans = [
        span.model_copy(update={"parameters": known}) if span.turn == 0 else span
        for span in run.spans
    ]
    run = run.model_copy(update={"spans": tuple(spans)})
    _, _, first, _, second = otel_spans(run, Redactor(), langfuse=langfuse)
    told: Any = first.attributes
    if langfuse:
        assert json.loads(told["langfuse.observation.model.parameters"]) == known
        assert "langfuse.observation.model.parameters" not in (second.attributes or {})
    else:
        assert told["gen_ai.request.temperature"] == 0.5
        assert told["gen_ai.request.max_tokens"] == 4
        assert list(told["gen_ai.request.stop_sequences"]) == ["\n"]


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ({"role": "user", "content": "hi"}, [{"type": "text", "content": "hi"}]),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            [{"type": "tool_call", "id": "c", "name": "search", "arguments": "{}"}],
        ),
        (
            {"role": "tool", "tool_call_id": "c", "content": "Monday"},
            [{"type": "tool_call_response", "id": "c", "response": "Monday"}],
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]},
            [{"type": "text", "content": "hi"}, {"type": "image"}],
        ),
    ],
)
def test_messages_in_the_shape_of_the_conventions(message: Any, parts: Any) -> None:
    assert gen_ai_message(message) == {"role": message["role"], "parts": parts}


def test_scores_are_those_of_the_sdks_model() -> None:
    batch = ExportBatch(runs=(exported(),), experiments={"e": {"reward_mean": 1.0}})
    found = scores_of(batch, Redactor())
    for one in found:
        CreateScoreRequest.model_validate(one)
    trace = ids.trace_id("run-1")
    by_name = {
        one["name"]: one for one in found if one.get("traceId") and "observationId" not in one
    }
    assert {name: one["value"] for name, one in by_name.items()} == {
        "reward": 1.0,
        "ruler": 0.9,
        "trained_tokens": 2.0,
    }
    assert by_name["ruler"]["comment"] == "short and right" and by_name["ruler"]["traceId"] == trace
    (call,) = [one for one in found if "observationId" in one]
    assert call["observationId"] == ids.call_observation_id("run-1", "run-1-a")
    assert call["value"] == 0.25
    (mean,) = [one for one in found if "datasetRunId" in one]
    assert (mean["datasetRunId"], mean["name"]) == ("e", "reward_mean")
    assert len({one["id"] for one in found}) == len(found)
    assert scores_of(batch, Redactor()) == found

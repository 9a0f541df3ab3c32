from langfuse import Langfuse

from langchain_art.export import ids
from langchain_art.wire import Turn


def test_a_trace_id_is_the_one_that_langfuses_sdk_computes():
    assert ids.trace_id("run-17") == Langfuse.create_trace_id(seed="run-17")


def test_every_span_of_a_run_has_an_id_of_its_own():
    turns = [Turn(call_id="a"), Turn(), Turn()]
    found = [ids.turn_observation_id("run-17", turn, n) for n, turn in enumerate(turns)]
    found += [ids.root_id("run-17"), *(ids.span_id("run-17", n) for n in range(3))]
    assert len(set(found)) == len(found)
    assert all(len(one) == 16 and int(one, 16) for one in found)
    assert found[0] == ids.call_observation_id("run-17", "a")
    assert found[0] != ids.call_observation_id("run-18", "a")


def test_the_url_of_a_trace_needs_no_request():
    url = ids.trace_url("https://lf.example/", "my project", "run-17")
    assert url == f"https://lf.example/project/my%20project/traces/{ids.trace_id('run-17')}"

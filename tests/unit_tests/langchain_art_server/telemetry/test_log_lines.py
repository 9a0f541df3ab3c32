"""The log's lines: what they have of a request or a job, and what they never have."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from langchain_art_server.telemetry.log_context import CURRENT, LogContext, request_id_of
from langchain_art_server.telemetry.log_lines import JsonLines, TextLines

SECRET = "sk-art-0123456789abcdefghijklmnop"


def line(message: str, *args: Any, **extra: Any) -> dict[str, Any]:
    record = logging.LogRecord("art", logging.WARNING, "f.py", 1, message, args, None)
    vars(record).update(extra)
    said = JsonLines().format(record)
    assert "\n" not in said
    return json.loads(said)


def test_a_record_is_one_object_on_one_line() -> None:
    said = line("two\nlines of %s", "text\u2028")
    assert said.pop("time").endswith("Z")
    assert said == {"level": "warning", "logger": "art", "message": "two\nlines of text\u2028"}


def test_a_record_says_whose_it_is() -> None:
    context = LogContext(request_id="r-1", tenant="ana", path_params={"job_id": "j", "name": "p"})
    token = CURRENT.set(context)
    try:
        said = line("x", fields={"status": 200})
    finally:
        CURRENT.reset(token)
    wanted = {"request_id": "r-1", "tenant": "ana", "job_id": "j", "policy": "p", "status": 200}
    assert said.items() >= wanted.items() and "run_id" not in said
    assert "request_id" not in line("x")


def test_a_traceback_is_a_field_and_no_line_has_a_secret() -> None:
    try:
        raise ValueError(f"with {SECRET}")
    except ValueError:
        raised = sys.exc_info()
    record = logging.LogRecord("art", logging.ERROR, "f.py", 1, f"key {SECRET}", (), raised)
    vars(record)["fields"] = {"route": f"/{SECRET}"}
    said = JsonLines().format(record)
    assert "ValueError" in json.loads(said)["exception"]
    assert SECRET not in said and SECRET not in TextLines("%(message)s").format(record)


@pytest.mark.parametrize("given", [b"a", b"0af7:1/x_2-y=", b"x" * 128])
def test_a_well_formed_id_is_taken(given: bytes) -> None:
    assert request_id_of(given) == given.decode()


@pytest.mark.parametrize("given", [None, b"", b"a b", b"x" * 129, b"a\n", "ä".encode(), b'"'])
def test_any_other_request_gets_an_id_of_its_own(given: bytes | None) -> None:
    one, other = request_id_of(given), request_id_of(given)
    assert one != other and one.startswith("req-") and len(one) == 28

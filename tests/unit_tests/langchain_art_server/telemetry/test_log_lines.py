import json
import logging
import sys
from typing import Any

import pytest

from langchain_art_server.telemetry.log_context import (
    CURRENT,
    JsonLines,
    LogContext,
    TextLines,
    request_id_of,
)

KEY = "9DDaF9GcuMTOUT3uFE8Tb4x-ltJHoEHX5eesrK_ofOk"
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


@pytest.mark.parametrize("key", [KEY, f"sk-art-{KEY}"])
def test_a_key_in_a_path_is_in_no_field_no_line_and_no_span(key: str) -> None:
    context = LogContext(request_id=key, model=key, path_params={"name": key, "job_id": f"a:{key}"})
    assert key not in str(context.fields()) and context.fields()["job_id"] == "a:[redacted]"
    token = CURRENT.set(context)
    try:
        said = line(f"GET /v1/policies/{key} failed.", fields={"path": f"/{key}/x"})
    finally:
        CURRENT.reset(token)
    assert key not in str(said) and said["message"] == "GET /v1/policies/[redacted] failed."
    record = logging.LogRecord("art", logging.ERROR, "f.py", 1, f"no /{key}", (), None)
    assert TextLines("%(message)s").format(record) == "no /[redacted]"


@pytest.mark.parametrize("name", ["0123456789abcdef" * 4, f"trajectory-{'0a' * 16}", "A1b" * 14])
def test_a_name_that_is_no_key_stays(name: str) -> None:
    assert LogContext(run_id=name).fields() == {"run_id": name}
    assert line(name)["message"] == name


@pytest.mark.parametrize("given", [b"a", b"0af7:1/x_2-y=", b"x" * 128])
def test_a_well_formed_id_is_taken(given: bytes) -> None:
    assert request_id_of(given) == given.decode()


@pytest.mark.parametrize("given", [None, b"", b"a b", b"x" * 129, b"a\n", "ä".encode(), b'"'])
def test_any_other_request_gets_an_id_of_its_own(given: bytes | None) -> None:
    one, other = request_id_of(given), request_id_of(given)
    assert one != other and one.startswith("req-") and len(one) == 28

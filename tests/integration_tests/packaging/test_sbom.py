"""The bills of materials say what is there, by CycloneDX's own schema."""

import hashlib
import json
import runpy
from collections.abc import Callable
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.integration_tests.packaging.test_locks import PROJECT, Requirement, pins
from tests.support.live_server import REPO

SBOM: dict[str, Any] = runpy.run_path(str(REPO / "requirements/sbom.py"))
of_wheel: Callable[[], str] = SBOM["of_wheel"]
of_lock: Callable[[str], str] = SBOM["of_lock"]


def checked(document: str) -> dict[str, Any]:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(document) is None
    return json.loads(document)


def test_a_broken_document_is_found() -> None:
    broken = of_wheel().replace('"type": "library"', '"type": "book"')
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(broken) is not None


def test_the_wheels_is_written_and_holds_what_the_wheel_does() -> None:
    assert (REPO / "requirements/langchain-art.cdx.json").read_text() == of_wheel(), (
        "run: python requirements/sbom.py"
    )
    found = checked(of_wheel())
    assert found["metadata"]["component"]["name"] == "langchain-art"
    files = {one["name"]: one for one in found["components"] if one["type"] == "file"}
    vendor = REPO / "server/langchain_art_server/page/static/vendor"
    shipped = [one for one in vendor.iterdir() if not one.name.endswith((".d.ts", ".json"))]
    assert files.keys() == {one.name for one in shipped}
    for one in shipped:
        [digest] = files[one.name]["hashes"]
        assert digest["content"] == hashlib.sha256(one.read_bytes()).hexdigest()
    asked = {one["name"] for one in found["components"] if one.get("scope") == "required"}
    assert asked == {Requirement(line).name for line in PROJECT["dependencies"]}


@pytest.mark.parametrize("lock", ["gpu", "local", "build"])
def test_a_locks_holds_every_release_with_its_hash(lock: str) -> None:
    found = checked(of_lock(lock))
    assert {one["name"]: one["version"] for one in found["components"]} == pins(lock)
    assert all(one["hashes"] for one in found["components"])

"""Write a software bill of materials: CycloneDX 1.6, as JSON.

    python requirements/sbom.py                       # requirements/langchain-art.cdx.json
    python requirements/sbom.py local out/local.cdx.json    # or gpu, build: of a lock

The first is what the wheel carries (`.dist-info/sboms/`, PEP 770): the JavaScript that it contains,
with hashes, and the packages that it asks for, without a release, since the wheel names ranges. The
others are what a lock file installs, each release with the hash of its wheel. Neither has a date or
a random number: the same files give the same document.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
REPO = HERE.parent
OF_WHEEL = HERE / "langchain-art.cdx.json"
VENDOR = REPO / "server/langchain_art_server/page/static/vendor"
_PIN = re.compile(r"([a-z0-9.-]+)==(\S+) \\\n    --hash=sha256:([0-9a-f]{64})\n")
_VERSION = re.compile(r'__version__ = "(.+)"')


def of_wheel() -> str:
    """The document of the wheel."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    needed = {Requirement(line): ComponentScope.REQUIRED for line in project["dependencies"]}
    for lines in project["optional-dependencies"].values():
        for one in map(Requirement, lines):
            if one.name != project["name"] and one.name not in {known.name for known in needed}:
                needed[one] = ComponentScope.OPTIONAL
    return _document([*_vendored(), *(_needed(one, scope) for one, scope in needed.items())])


def of_lock(name: str) -> str:
    """The document of what ``requirements/NAME.txt`` installs."""
    pins = _PIN.findall((HERE / f"{name}.txt").read_text())
    return _document(
        Component(
            name=package,
            version=version,
            type=ComponentType.LIBRARY,
            purl=(purl := PackageURL("pypi", None, package, version)),
            bom_ref=str(purl),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        )
        for package, version, digest in pins
    )


def _vendored() -> Iterable[Component]:
    for one in json.loads((VENDOR / "manifest.json").read_text()):
        purl = PackageURL("npm", None, one["package"], one["version"], subpath=one["path"])
        yield Component(
            name=one["file"],
            version=one["version"],
            type=ComponentType.FILE,
            purl=purl,
            bom_ref=str(purl),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one["sha256"])],
            licenses=[DisjunctiveLicense(name=one["licence"])],
        )


def _needed(one: Requirement, scope: ComponentScope) -> Component:
    purl = PackageURL("pypi", None, canonicalize_name(one.name))
    return Component(
        name=one.name,
        type=ComponentType.LIBRARY,
        scope=scope,
        purl=purl,
        bom_ref=str(purl),
        properties=[Property(name="langchain-art:range", value=str(one.specifier) or "any")],
    )


def _document(components: Iterable[Component]) -> str:
    found = _VERSION.search((REPO / "langchain_art/_version.py").read_text())
    assert found is not None
    purl = PackageURL("pypi", None, "langchain-art", found[1])
    root = Component(
        name="langchain-art",
        version=found[1],
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=str(purl),
        licenses=[DisjunctiveLicense(id="Apache-2.0")],
    )
    bom = Bom(components=components)
    bom.metadata.component = root
    bom.register_dependency(root, bom.components)
    written = json.loads(JsonV1Dot6(bom).output_as_string())
    written.pop("serialNumber", None)
    written["metadata"].pop("timestamp", None)
    return json.dumps(written, indent=1, ensure_ascii=False) + "\n"


def main(name: str = "", out: str = "") -> None:
    """Write the document of the wheel, or of the lock `name` to `out`."""
    path = Path(out) if name else OF_WHEEL
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(of_lock(name) if name else of_wheel())


if __name__ == "__main__":
    main(*sys.argv[1:])

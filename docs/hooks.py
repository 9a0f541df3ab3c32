"""What the documentation's build adds to MkDocs: generated pages, and checks that end the build.

Generated: the home page (README.md), contributing, changelog, the notebooks with their stored
outputs, the HTTP API (from the server's OpenAPI document) and the command line (from its own
help). Checked at the end: every public name has a docstring and stands in the API reference, and no
page loads anything from another host.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocstrings import Inventory

from docs.notebook_pages import notebook
from langchain_art.cli.main import app
from langchain_art_server.__main__ import cli as server_cli
from langchain_art_server.config import Settings
from langchain_art_server.gateway.app import create_app
from langchain_art_server.telemetry.metrics import Metrics

REPO = Path(__file__).parent.parent
PUBLIC = (
    "langchain_art",
    "langchain_art.analytics",
    "langchain_art.environments",
    "langchain_art.evaluators",
    "langchain_art.harbor",
    "langchain_art.trackers",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for name, page in {
        "index.md": from_root("README.md"),
        "contributing.md": from_root("CONTRIBUTING.md"),
        "changelog.md": from_root("CHANGELOG.md"),
        "http-api.md": http_api(),
        "command-line.md": command_line(),
    }.items():
        files.append(File.generated(config, name, content=page))
    for path in sorted((REPO / "docs" / "notebooks").glob("*.ipynb")):
        page = notebook(path, config.extra.get("repository"))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes our tests' option from blocks of code: SuperFences shows a block as text with it.

    A link to a notebook becomes one to its page.
    """
    markdown = re.sub(r"(\]\([\w./]*notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)
    return re.sub(r'^(```.*?) notest="[^"]*"$', r"\1", markdown, flags=re.MULTILINE)


def fence(page: Path) -> bool:
    """True if a page shows the fence of a block of code, which is then no block."""
    return "<p>```" in page.read_text()


def on_post_build(config: MkDocsConfig) -> None:
    """Ends the build if a public name is undocumented, or a page shows a fence or needs a host."""
    site = Path(config.site_dir)
    fences = [f"{page.name} shows ``` as text" for page in site.glob("*.html") if fence(page)]
    problems = [*undocumented(site), *foreign(site), *fences]
    if problems:
        raise PluginError("\n".join(problems))


# --- pages from the repository's root -----------------------------------------------------------


def from_root(name: str) -> str:
    """A page of the repository's root, with its links as they are seen from docs/."""
    text = (REPO / name).read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    for page in ("CONTRIBUTING", "CHANGELOG"):
        text = text.replace(f"]({page}.md", f"]({page.lower()}.md")
    text = text.replace("](README.md", "](index.md")
    # The site has no source files: a link to one becomes its path.
    text = re.sub(r"\[[^]]*\]\(((?:examples|tests|server)/[^)]*)\)", r"`\1`", text)
    return text


# --- the HTTP API -------------------------------------------------------------------------------


def openapi() -> dict[str, Any]:
    """The document that a server gives at /openapi.json, without a server."""
    info = SimpleNamespace(max_model_len=32768)  # no limit of it is in the document
    sampler = SimpleNamespace(info=info)
    service = SimpleNamespace(settings=Settings(model="any"), sampler=sampler, sessions=None)
    service.keys, service.tenant, service.no_images = None, "", ""
    service.metrics = Metrics()
    service.tenants = SimpleNamespace(stored_bytes_of=None)
    service.tenants.app_of = lambda _: service.tenants.make_app(service)

    def without_page(*_: object) -> None:
        """Its routes are not in the document."""

    served = create_app(service, without_page)  # type: ignore[arg-type]

    async def ask() -> dict[str, Any]:
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get("/openapi.json")).raise_for_status().json()

    return asyncio.run(ask())


API_INTRODUCTION = """# HTTP API

Generated from the server's OpenAPI document, which a running server gives at `/openapi.json`.
Bodies and answers are JSON, and a body says so (`Content-Type: application/json`). With a key, send
it as `Authorization: Bearer …`. A refused request has OpenAI's error shape,
`{"error": {"message", "type", "code", "param"}}`; the codes are those of the
[errors](reference/errors.md), and the document lists each route's statuses. Requests may be sent
again: stores are idempotent by id, training by its `Idempotency-Key`.
"""


def http_api() -> str:
    """The page of the HTTP API."""
    document = openapi()
    schemas = document["components"]["schemas"]
    lines = [API_INTRODUCTION, "## Routes\n"]
    used: set[str] = set()
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            lines += [f"### {method.upper()} `{path}`\n", route.get("description", ""), ""]
            lines += list(parameters(route))
            for title, schema in route_bodies(route):
                used |= references(schema)
                lines.append(f"{title}: {type_of(schema)}\n")
    while more := {r for name in used for r in references(schemas.get(name, {}))} - used:
        used |= more
    lines.append("## Bodies\n")
    for name in sorted(used & set(schemas)):
        if name.startswith(("HTTPValidation", "ValidationError", "ListOf_")):
            continue
        lines += list(schema_lines(name, schemas[name]))
    return "\n".join(lines)


def parameters(route: dict[str, Any]) -> Iterator[str]:
    """The table of a route's parameters beside those in its path."""
    found = [one for one in route.get("parameters", []) if one["in"] != "path"]
    if found:
        yield "| parameter | in | type | default |\n|---|---|---|---|"
        for one in found:
            default = "required" if one.get("required") else code(one["schema"].get("default"))
            kind = type_of(one["schema"])
            yield f"| `{one['name']}` | {one['in']} | {kind} | {default} |"
        yield ""


def route_bodies(route: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a route takes and gives."""
    body = route.get("requestBody", {}).get("content", {}).get("application/json")
    if body:
        yield "Takes", body["schema"]
    for status, answer in route.get("responses", {}).items():
        schema = answer.get("content", {}).get("application/json", {}).get("schema")
        if status.startswith("2") and schema:
            yield f"Gives ({status})", schema


def references(schema: Any) -> set[str]:
    """Names of the schemas that a schema refers to, titles of inline bodies included."""
    if isinstance(schema, list):
        return {name for one in schema for name in references(one)}
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return own | {name for one in schema.values() for name in references(one)}


def type_of(schema: dict[str, Any]) -> str:
    """A schema as a word, with links to the bodies that have a section."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if found := re.fullmatch(r"ListOf_(\w+)", name):
            return f'`{{"object": "list", "data": […]}}` of {type_of({"$ref": "/" + found[1]})}'
        if name.startswith("dict_"):
            return "objects"
        return f"[{name.strip('_')}](#{name.strip('_').lower()})"
    if "enum" in schema:
        return " or ".join(code(value) for value in schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    for many in ("anyOf", "oneOf"):
        if many in schema:
            return " or ".join(dict.fromkeys(type_of(one) for one in schema[many]))
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        if schema.get("properties"):
            names = ", ".join(f"`{name}`: {type_of(s)}" for name, s in schema["properties"].items())
            return f"object of {names}"
        return f"object of {type_of(inner)}" if isinstance(inner, dict) and inner else "object"
    return str(schema.get("type", "any value"))


def schema_lines(name: str, schema: dict[str, Any]) -> Iterator[str]:
    """The section of a body."""
    yield f"### {name.strip('_')}\n"
    yield inspect.cleandoc(schema.get("description", "")).split("\n\nExample")[0] + "\n"
    fields = schema.get("properties", {})
    if not fields:
        yield f"{type_of(schema)}\n"
        return
    yield "| field | type | default | |\n|---|---|---|---|"
    for field, one in fields.items():
        required = field in schema.get("required", ())
        default = "required" if required else code(one["default"]) if "default" in one else ""
        words = " ".join(one.get("description", "").split()).replace("|", "\\|")
        yield f"| `{field}` | {type_of(one)}{bounds(one)} | {default} | {words} |"
    yield ""


def bounds(schema: dict[str, Any]) -> str:
    """The limits of a value."""
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "over",
        "maximum": "at most",
        "exclusiveMaximum": "under",
        "maxLength": "characters: at most",
        "maxItems": "items: at most",
    }
    found = [f"{word} {schema[key]:,}" for key, word in words.items() if key in schema]
    return f" ({', '.join(found)})" if found else ""


def code(value: Any) -> str:
    """A value as JSON writes it."""
    words = {True: "true", False: "false", None: "null"}
    plain = words[value] if value is None or isinstance(value, bool) else value
    return f"`{plain}`"


# --- the command line ---------------------------------------------------------------------------


def command_line() -> str:
    """The page of the command line: each command's help, as the terminal shows it."""
    lines = [
        "# Command line\n",
        "Generated from the command's own help. Every command but `serve` and `demo` only talks to "
        "a server; `ART_BASE_URL` and `ART_API_KEY` say to which, and with which key.\n",
    ]
    for path, command in commands(typer.main.get_command(app), ("langchain-art",)):
        if hasattr(command, "commands"):
            continue
        lines.append(f"## {' '.join(path)}\n")
        about = inspect.cleandoc(command.help or "").replace("\b\n", "")
        text, _, example = about.partition("Example")
        lines.append(text.strip() + "\n")
        if example:
            rows = example.partition("\n")[2]
            lines.append("```text\n" + inspect.cleandoc(rows) + "\n```\n")
        lines += list(options(command))
    return "\n".join(lines)


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and those below it."""
    if path == ("langchain-art", "serve"):  # its options are the server's own
        command = typer.main.get_command(server_cli)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def options(command: Any) -> Iterator[str]:
    """The table of a command's arguments and options."""
    found = [one for one in command.params if one.name not in ("help", "version")]
    found = [one for one in found if not one.name.startswith(("install_", "show_"))]
    if not found:
        return
    yield "| argument or option | |\n|---|---|"
    for one in found:
        is_option = one.param_type_name == "option"
        named = one.opts if is_option else [one.metavar or one.name.upper()]
        words = " ".join((getattr(one, "help", None) or "").split()).replace("|", "\\|")
        words = words.replace("<", "&lt;").replace("[", "\\[")
        shown = " ".join(f"`{name}`" for name in named).replace("|", "\\|")
        yield f"| {shown} | {words} |"
    yield ""


# --- checks -------------------------------------------------------------------------------------


def undocumented(site: Path) -> Iterator[str]:
    """Public names without a docstring, or that the API reference does not show."""
    with (site / "objects.inv").open("rb") as file:
        shown = Inventory.parse_sphinx(file, domain_filter=["py"])
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            home = getattr(value, "__module__", package)
            if f"{package}.{name}" not in shown and f"{home}.{name}" not in shown:
                yield f"{package}.{name} is public, and docs/reference/ does not show it"
            if callable(value) and not (value.__doc__ or "").strip():
                yield f"{package}.{name} is public, and has no docstring"


class _Assets(HTMLParser):
    """What a browser loads for a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the address of what a tag loads."""
        given = dict(attrs)
        rel = given.get("rel") or ""
        if tag == "link" and rel not in ("canonical", "next", "prev", "alternate"):
            self.found.append(given.get("href") or "")
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object"):
            self.found += [given.get(name) or "" for name in ("src", "srcset", "data")]
        if "mermaid" in (given.get("class") or "").split():
            self.found.append("https://unpkg.com: material loads mermaid from there")


def foreign(site: Path) -> Iterator[str]:
    """Pages and style sheets that load something from another host."""
    for page in sorted(site.rglob("*.html")):
        assets = _Assets()
        assets.feed(page.read_text())
        for address in assets.found:
            if re.match(r"(https?:)?//", address):
                yield f"{page.relative_to(site)} loads {address}"
    for sheet in sorted(site.rglob("*.css")):
        for address in re.findall(
            r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text()
        ):
            yield f"{sheet.relative_to(site)} loads {address}"

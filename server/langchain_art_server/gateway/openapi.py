"""The OpenAPI document: FastAPI's, with the bodies that routes read and the errors they answer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from langchain_art_server.gateway.auth import CALLS, CHAT, MESSAGES, OPEN_PATHS, RESPONSES
from langchain_art_server.gateway.chat.anthropic_messages import MessagesBody, TokenCountBody
from langchain_art_server.gateway.chat.openai_responses import ResponsesBody
from langchain_art_server.gateway.chat.request import ChatBody

_SAMPLES = "Sample a reply from a policy, one of its versions, or the base model."
_STREAMED = "whole or as server-sent events."
#: The routes of model calls: the model of their body, summary, description, and answer.
_CALL_DOCS: dict[str, tuple[type[BaseModel], str, str, str]] = {
    CHAT: (ChatBody, "Create Chat Completion", _SAMPLES, f"The completion, {_STREAMED}"),
    RESPONSES: (ResponsesBody, "Create Response", _SAMPLES, f"The response, {_STREAMED}"),
    MESSAGES: (MessagesBody, "Create Message", _SAMPLES, f"The message, {_STREAMED}"),
    f"{MESSAGES}/count_tokens": (
        TokenCountBody,
        "Count Message Tokens",
        "Count the prompt's tokens.",
        "The number of tokens.",
    ),
}
_REF = "#/components/schemas/{model}"
_DEFINITIONS: dict[str, Any] = {}
_REFUSALS = {
    "400": "A field is missing, malformed, out of range, or not supported.",
    "401": "No API key, or a wrong one; or, without a key, another origin than the server's own.",
    "403": "The API key lacks the scope that the route needs.",
    "404": "What the request names is not there.",
    "405": "The path does not take this method.",
    "408": "The body came too slowly.",
    "409": "The id or key was used before with another body, or a job uses what would change.",
    "413": "The body is too large.",
    "429": "A bounded queue is full; Retry-After says when to send it again.",
    "500": "The server failed at this request; its log says why.",
    "503": "An engine, the store or memory is not available; Retry-After says when to retry.",
}


class ErrorDetail(BaseModel):
    """Problem, what was got, what was expected and what to do."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(BaseModel):
    """An error, in the form of OpenAI's API."""

    error: ErrorDetail


def body_docs(kind: type[BaseModel]) -> dict[str, Any]:
    """The part of the document for a JSON body that a route reads itself."""
    schema = kind.model_json_schema(ref_template=_REF)
    _DEFINITIONS.update(schema.pop("$defs", {}))
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def document_route(app: FastAPI) -> None:
    """Add the route of the document, which is made once: it takes some 20 ms of the event loop."""
    made = list[bytes]()

    @app.get("/openapi.json", include_in_schema=False)
    async def get_document() -> Response:
        """Get the OpenAPI document of these routes."""
        if not made:
            made.append(bytes(JSONResponse(_document(app)).body))
        return Response(made[0], media_type="application/json")


def _document(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, (body, summary, description, answered) in _CALL_DOCS.items():
        about = {
            "summary": summary,
            "description": description,
            "operationId": summary.lower().replace(" ", "_"),
            "responses": {"200": {"description": answered}},
        }
        schema["paths"][path] = {"post": about | body_docs(body)}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _add_refusals(path, method, operation)
    error = ErrorBody.model_json_schema(ref_template=_REF)
    definitions = _DEFINITIONS | error.pop("$defs") | {ErrorBody.__name__: error}
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions)
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, never answered
        schemas.pop(unused, None)
    return schema


def _add_refusals(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    answered = (
        {"405", "500", "503"} if path in OPEN_PATHS else set(_REFUSALS) - {"404", "409", "413"}
    )
    body = operation.get("requestBody", {"content": {"application/json": {"schema": {}}}})
    fields = body["content"]["application/json"]["schema"].get("properties", {})
    if "{" in path or path in CALLS or "policy" in fields:
        answered.add("404")
    if method != "get" and path not in CALLS:
        answered.add("409")
    if "requestBody" in operation:
        answered.add("413")
    else:
        answered.discard("408")
    ref = {"$ref": _REF.format(model=ErrorBody.__name__)}
    for status in sorted(answered):
        content = {"application/json": {"schema": ref}}
        responses[status] = {"description": _REFUSALS[status], "content": content}

"""Images in messages: a record names them by their SHA-256, and their data is stored once."""

from __future__ import annotations

import binascii
import hashlib
from base64 import b64decode
from typing import Any


def image_data(part: Any) -> str | None:
    """The image of a message's content part: a data URL, or any other; None: it has none.

    OpenAI's ``image_url``, and LangChain's block ``image`` with ``base64`` or ``url``.
    """
    if not isinstance(part, dict):
        return None
    if part.get("type") == "image_url":
        found = part.get("image_url")
        return str(found.get("url") if isinstance(found, dict) else found)
    if part.get("type") != "image" or "sha256" in part:
        return None
    if (data := part.get("base64")) is None:
        return str(part.get("url"))
    return f"data:{part.get('mime_type') or 'image'};base64,{data}"


def decoded(url: str) -> bytes:
    """The bytes of a data URL. Raises ValueError: it is another, or not in base64."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise ValueError(f"got {url[:60]!r}")
    try:
        return b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"got data that is not base64 ({error})") from error


def image_reference(body: bytes) -> dict[str, str]:
    """The content part that names an image."""
    return {"type": "image", "sha256": hashlib.sha256(body).hexdigest()}


def without_data(content: list[Any]) -> list[Any]:
    """Content parts, with each image's data replaced by its reference."""
    parts: list[Any] = []
    for part in content:
        try:
            url = image_data(part)
            parts.append(part if url is None else image_reference(decoded(url)))
        except ValueError:  # an address, which is short
            parts.append(part)
    return parts

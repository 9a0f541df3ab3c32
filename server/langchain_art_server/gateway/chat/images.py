"""Takes images out of a request's messages, which name them from there on."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, cast

from pybase64 import b64encode_as_string

from langchain_art.errors import InvalidRequest
from langchain_art.wire.images import decoded, image_data, image_reference

#: Most images of a request, bytes of one, and pixels of one.
MAX_IMAGES, MAX_IMAGE_BYTES, MAX_PIXELS = 64, 8 << 20, 1 << 24
#: Formats, and how a file of each begins.
FORMATS = {"PNG": b"\x89PNG\r\n", "JPEG": b"\xff\xd8\xff", "WEBP": b"RIFF", "GIF": b"GIF8"}


def take_images(messages: list[dict[str, Any]], no_images: str = "") -> dict[str, bytes]:
    """Replace the images in messages by references; returns them by SHA-256.

    `no_images` is the reason why there may be none; empty: there may.

    Raises InvalidRequest: there may be none, or one is an address, too large, or of another format.
    """
    found: dict[str, bytes] = {}
    for index, message in enumerate(messages):
        content: Any = message.get("content")
        for at, part in enumerate(cast(list[Any], content) if isinstance(content, list) else ()):
            where = f"messages.{index}.content.{at}"
            if isinstance(part, dict) and "sha256" in part:
                raise _refused(where, "an image's name alone", "its data")
            if (url := image_data(part)) is None:
                continue
            if no_images:
                raise InvalidRequest(
                    f"got an image, and none can be shown to this server's model: {no_images}. "
                    "Leave images out, or serve a model that reads them (docs/models.md).",
                    param="messages",
                )
            body = _checked(url, where)
            content[at] = named = image_reference(body)
            found[named["sha256"]] = body
            if len(found) > MAX_IMAGES:
                raise _refused(where, f"more than {MAX_IMAGES} images in one request", "fewer")
    return found


def give_back_images(messages: list[dict[str, Any]], images: Mapping[str, bytes]) -> None:
    """Undo what `take_images` did to the messages of an earlier call."""
    for message in messages:
        content: Any = message.get("content")
        for at, part in enumerate(cast(list[Any], content) if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("sha256") in images:
                body = images[part["sha256"]]
                content[at] = {"type": "image", "base64": b64encode_as_string(body)}


def _checked(url: str, where: str) -> bytes:
    try:
        body = decoded(url)
    except ValueError as error:
        raise InvalidRequest(
            f"{where}: {error}, expected an image's data, "
            "data:image/png;base64,…: this server fetches no address. Send the data.",
            param="messages",
        ) from error
    if len(body) > MAX_IMAGE_BYTES:
        raise _refused(where, f"an image of {len(body)} bytes", f"at most {MAX_IMAGE_BYTES}")
    if (kind := image_format(body)) is None:
        raise _refused(where, f"data that begins with {body[:8]!r}", f"one of {sorted(FORMATS)}")
    width, height = _size(body, kind, where)
    if width * height > MAX_PIXELS:
        raise _refused(
            where, f"an image of {width} x {height} pixels", f"at most {MAX_PIXELS} pixels"
        )
    return body


def image_format(body: bytes) -> str | None:
    """The key in `FORMATS` of an image; None: it is of another."""
    return next((kind for kind, begin in FORMATS.items() if body.startswith(begin)), None)


def _size(body: bytes, kind: str, where: str) -> tuple[int, int]:
    from PIL import Image  # noqa: PLC0415 - an extra's; where it lacks, images are refused before

    try:
        with Image.open(io.BytesIO(body), formats=(kind,)) as image:  # reads its header alone
            return image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(
            f"{where}: got an image that cannot be read: {error}", param="messages"
        ) from error


def _refused(where: str, got: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: got {got}, expected {expected}", param="messages")

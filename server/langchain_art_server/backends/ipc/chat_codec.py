"""Chat requests and replies in the frames between the server and a sampler's process.

The numbers of a reply travel as bytes in base64: as JSON's decimals they would cost the gateway
more time than everything else that it does for a long prompt. A request travels as its fields.
"""

from __future__ import annotations

from array import array
from typing import Any

from pybase64 import b64decode, b64encode_as_string
from pydantic import TypeAdapter

from langchain_art_server.algorithms.sequences.image_tokens import id_array
from langchain_art_server.backends.base import ChatReply, ChatRequest

_request = TypeAdapter(ChatRequest)
_TYPES = {"token_ids": "i", "logprobs": "d"}


def unpack_request(fields: dict[str, Any]) -> ChatRequest:
    """A request from the JSON of its fields."""
    return _request.validate_python(fields)


def pack_reply(reply: ChatReply) -> dict[str, Any]:
    """A reply as JSON-able fields."""
    packed = {
        name: b64encode_as_string(array(code, getattr(reply, name)))
        for name, code in _TYPES.items()
    }
    prompt, drawn_from = id_array(reply.prompt_token_ids), b64encode_as_string(reply.drawn_from)
    ids = [prompt.typecode, b64encode_as_string(prompt)]
    return vars(reply) | packed | {"prompt_token_ids": ids, "drawn_from": drawn_from}


def unpack_reply(packed: dict[str, Any]) -> ChatReply:
    """The reply of `pack_reply`; its numbers are arrays, bit for bit the same."""
    fields = dict(packed)
    arrays = {name: (code, packed[name]) for name, code in _TYPES.items()}
    for name, (code, data) in (arrays | {"prompt_token_ids": packed["prompt_token_ids"]}).items():
        # With `validate` it takes a twentieth of the time.
        fields[name] = array(code, b64decode(data, validate=True))
    fields["drawn_from"] = b64decode(packed["drawn_from"], validate=True)
    fields["top_logprobs"] = [[(i, p, t) for i, p, t in one] for one in packed["top_logprobs"]]
    return ChatReply(**fields)

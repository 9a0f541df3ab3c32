"""A reply on its way through the engine's socket, its numbers as bytes in base64.

As JSON's decimals they would cost the gateway more than all else that it does for a long prompt.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from typing import Any

from langchain_art_server.backends.base import ChatReply

_TYPES = {"prompt_token_ids": "i", "token_ids": "i", "logprobs": "d"}


def pack_reply(reply: ChatReply) -> dict[str, Any]:
    """A reply as JSON-able values."""
    packed = {
        name: b64encode(array(code, getattr(reply, name)).tobytes()).decode()
        for name, code in _TYPES.items()
    }
    return vars(reply) | packed


def unpack_reply(packed: dict[str, Any]) -> ChatReply:
    """The reply again; its numbers are arrays, bit for bit what they were."""
    whole = dict(packed)
    for name, code in _TYPES.items():
        whole[name] = array(code, b64decode(packed[name]))
    whole["top_logprobs"] = [[(i, p, t) for i, p, t in tokens] for tokens in packed["top_logprobs"]]
    return ChatReply(**whole)

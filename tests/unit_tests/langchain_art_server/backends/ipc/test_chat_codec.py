"""What crosses the engine's socket arrives as it was: the numbers of a reply."""

import struct
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from langchain_art_server.backends.base import ChatReply
from langchain_art_server.backends.ipc.chat_codec import pack_reply, unpack_reply

ids = st.lists(st.integers(0, 2**31 - 1))


@given(prompt=ids, said=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats())))
def test_a_reply_comes_back_bit_for_bit(prompt: list[int], said: list[tuple[int, float]]) -> None:
    reply = ChatReply(
        prompt_token_ids=prompt,
        token_ids=[token for token, _ in said],
        logprobs=[logprob for _, logprob in said],
        content="é\u2028",
        tool_calls=[{"id": "c"}],
        finish_reason="tool_calls",
        excluded_because="greedy",
        top_logprobs=[[(5, -0.5, "x"), (6, -1.0, "y")]],
        token_texts=["é"],
        drawn_from=bytes(range(256)),
    )
    back = unpack_reply(from_json(to_json(pack_reply(reply))))
    assert list(back.prompt_token_ids) == prompt
    assert list(back.token_ids) == reply.token_ids
    assert [struct.pack("d", p) for p in back.logprobs] == [
        struct.pack("d", p) for p in reply.logprobs
    ]
    numbers = {"prompt_token_ids": [], "token_ids": [], "logprobs": []}
    assert replace(back, **numbers) == replace(reply, **numbers)

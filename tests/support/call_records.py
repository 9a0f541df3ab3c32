"""Call records as the server would have written them, with made-up tokens."""

from collections.abc import Sequence
from typing import Any

from langchain_art.wire import CallTags
from langchain_art_server.storage.tables import CallRecord


def record(
    call_id: str, prompt: Sequence[int] = (1,), said: Sequence[int] = (2,), **changes: Any
) -> CallRecord:
    """A call of policy ``p``, trainable, that took a second."""
    values: dict[str, Any] = {
        "id": call_id,
        "created_at": 1.0,
        "policy": "p",
        "version": 0,
        "model": "p@0",
        "tags": CallTags(trajectory_id="t-1"),
        "request": {"messages": [{"role": "user", "content": "hello"}]},
        "reply": {"role": "assistant", "content": "there"},
        "prompt_token_ids": list(prompt),
        "token_ids": list(said),
        "logprobs": [-0.5] * len(said),
        "temperature": 1.0,
        "finish_reason": "stop",
        "excluded_because": None,
        "latency": 1.0,
    }
    return CallRecord(**(values | changes))

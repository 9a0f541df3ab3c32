"""A literal judge behind OpenAI's API, and what a judge by name made of a group there."""

import time
from collections.abc import Sequence
from typing import Any

from tests.support.json_server import JsonServer, Refusal, completion
from tests.support.judges.literal_judge import literal


class JudgeServer(JsonServer):
    """OpenAI's API on loopback, where the literal judge answers.

    Keeps the bodies that it was sent in `seen`; refuses as `refusals` say before it answers.
    """

    def __init__(self, refusals: Sequence[Refusal] = ()) -> None:
        super().__init__()
        self._refusals = list(refusals)
        self.times: list[float] = []

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def seen(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    def answer(self, path: str, body: Any) -> Any:
        self.times.append(time.monotonic())
        if self._refusals:
            raise self._refusals.pop(0)
        message = {"role": "assistant", "content": literal(body["messages"][1]["content"])}
        return completion(body["model"], message, 1000, 100)


def check_by_name(told: dict[str, Any], server: JudgeServer) -> None:
    """Check what `tests.support.judges.litellm_judge` tells."""
    assert told["rewards"] == [0.1, 0.9]
    assert (told["structured"], told["tokens"]) == (True, [2000, 200])
    assert 0.001 < told["cost"] < 0.1  # litellm's price of o3, for 2,200 tokens
    assert told["unpriced"] == [0, 2]
    assert "model_kwargs" in told["refused"]
    assert {body["model"] for body in server.seen} == {"o3", "no-such-model"}
    assert server.seen[0]["temperature"] == 1.0

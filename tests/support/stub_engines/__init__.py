"""The real server over engines that compute nothing: for tests of all that is not an engine.

Gateway, router, workers' sockets, processes, store, jobs and adapters are as they are. The sampler
waits, and says from which weights it "sampled"; the learner's weights are a digest of what it was
given, so that equal work gives equal bytes, and no other does.
"""

import hashlib
from pathlib import Path
from typing import Any

from tests.support.live_server import ForkedServer, LiveServer

#: Of a prompt and of a reply of these engines.
PROMPT, REPLY = 16, 4


class StubServer(ForkedServer):
    """`tests.support.stub_engines.__main__`: calls take `seconds`, drawn between the two.

    One that is `alone` is not forked: it shares no memory with the process of the tests.
    """

    def __init__(
        self,
        data_dir: Path,
        *args: str,
        seconds: tuple[float, float] = (0.0, 0.0),
        settings: str = "",
        env: dict[str, str] | None = None,
        alone: bool = False,
    ) -> None:
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        stub = {"STUB_SECONDS": f"{seconds[0]} {seconds[1]}"} | (env or {})
        module = "tests.support.stub_engines"
        super().__init__(data_dir, *args, settings=settings, env=stub, module=module)
        self.alone = alone

    def _launch(self) -> Any:
        return LiveServer._launch(self) if self.alone else super()._launch()


def mark(weights: bytes) -> float:
    """The logprob of every token that is sampled from these weights."""
    return -1.0 - int.from_bytes(hashlib.sha256(weights).digest()[:6], "big") / 2**48


def marked(call: dict[str, Any], weights: Path) -> bool:
    """Whether a call's record says that it was sampled from these weights, and whole."""
    expected = [mark(weights.read_bytes())] * REPLY
    return call["logprobs"] == expected and len(call["token_ids"]) == REPLY

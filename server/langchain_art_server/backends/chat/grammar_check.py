"""Grammar computations in a process of its own (`grammar_child`), within limits.

That they compile, for the engine of this server; and what they allowed, for another engine.

What is compiled cannot travel between processes: the engine compiles a second time what was proved.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from base64 import b64decode
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from langchain_art.errors import ArtError
from langchain_art_server.backends.chat import grammar_child
from langchain_art_server.backends.chat.grammar_child import LENGTH

#: Seconds of CPU (the system counts whole ones) and bytes for one grammar. Ordinary schemas take
#: milliseconds, and llguidance calls those of a second "extremely complex".
_CPU_SECONDS, _MEMORY = 1.0, 1 << 30
#: Seconds until an answer: on a busy machine the seconds of CPU take longer.
_ANSWER_SECONDS, _START_SECONDS = 15.0, 120.0
#: The same for the masks of a reply, of which each takes up to a millisecond.
_REPLY_CPU_SECONDS, _REPLY_SECONDS = 20.0, 60.0
#: Grammars whose outcome is kept, by digest.
_MAX_KEPT = 4096
_REASONS: dict[int, str] = {
    signal.SIGXCPU: f"compiling it takes more than {_CPU_SECONDS:.0f} s",
    signal.SIGKILL: f"compiling it took {_ANSWER_SECONDS:.0f} s, or too much memory",
    signal.SIGABRT: f"compiling it takes more than {_MEMORY >> 20} MiB, or too deep a recursion",
}


class _Child:
    """The process with the compiler, started when it is asked, and again after it ended.

    Args:
        tokenizer: of the library tokenizers, serialised.
        vocab: size of the logits.
        eos: ids of the tokens that end a reply.
        cpu: seconds for one grammar.
        python: the interpreter; it needs llguidance and nothing else.
    """

    def __init__(
        self, tokenizer: str, vocab: int, eos: list[int], cpu: float, python: str = sys.executable
    ) -> None:
        limits = {"cpu": cpu, "memory": _MEMORY}
        setup = {"tokenizer": tokenizer, "vocab": vocab, "eos": eos} | limits
        self._setup, self._python = json.dumps(setup).encode(), python
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def _ask(self, question: dict[str, Any], seconds: float) -> str | None:
        """The child's answer, or None if it ended."""
        if self._child is not None and self._child.poll() is not None:
            self._reap()  # it ended while it had nothing to do
        if self._child is None:
            self._child = subprocess.Popen(
                [self._python, "-I", str(Path(grammar_child.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if self._send(self._setup, _START_SECONDS) is None:
                status = self._reap()
                raise ArtError(f"The compiler of grammars cannot be started (status {status}).")
        return self._send(json.dumps(question).encode(), seconds)

    def _send(self, data: bytes, seconds: float) -> str | None:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        limit = threading.Timer(seconds, child.kill)
        limit.daemon = True
        limit.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(LENGTH.pack(len(data)) + data)
                child.stdin.flush()
            head = child.stdout.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return None
            return child.stdout.read(LENGTH.unpack(head)[0]).decode()
        finally:
            limit.cancel()

    def _reap(self) -> int:
        """End the child; returns its status. The next grammar starts another."""
        child, self._child = self._child, None
        assert child is not None
        with contextlib.suppress(BrokenPipeError), child:
            child.kill()
        return child.returncode


class GrammarCheck(_Child):
    """Checks grammars for one tokenizer, one at a time; used by several threads."""

    def __init__(self, tokenizer: str, vocab: int, eos: list[int]) -> None:
        super().__init__(tokenizer, vocab, eos, _CPU_SECONDS)
        self._outcomes: OrderedDict[bytes, str] = OrderedDict()

    def problem(self, grammar: str) -> str:
        """Reason why the grammar cannot be compiled within the limits; empty if it can be.

        Raises:
            ArtError: the child process cannot be started.
        """
        key = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if key in self._outcomes:
                self._outcomes.move_to_end(key)
                return self._outcomes[key]
            found, status = self._ask({"grammar": grammar}, _ANSWER_SECONDS), 0
            if found is None:
                status = self._reap()
                ended = f"compiling it ended the compiler (status {status})"
                found = _REASONS.get(-status, ended)
            if -status != signal.SIGKILL:  # a busy machine may be the reason
                self._outcomes[key] = found
                if len(self._outcomes) > _MAX_KEPT:
                    self._outcomes.popitem(last=False)
            return found


class GrammarReplay(_Child):
    """Computes what a grammar allowed at each token of a reply that another engine sampled.

    `python` is that engine's: another version of llguidance may allow other tokens.
    """

    def __init__(self, tokenizer: str, vocab: int, eos: list[int], python: str) -> None:
        super().__init__(tokenizer, vocab, eos, _REPLY_CPU_SECONDS, python)

    def masks(self, grammar: str, reply: list[int]) -> list[bytes] | None:
        """Bits of the allowed tokens, for each token; fewer if the grammar forbids a token.

        None if that takes too long.

        Raises:
            ArtError: the child process cannot be started.
        """
        with self._lock:
            answer = self._ask({"grammar": grammar, "reply": reply}, _REPLY_SECONDS)
            if answer is None:
                self._reap()
                return None
        found = json.loads(answer)
        masks = [b64decode(mask) for mask in found["masks"]]
        return [masks[number] for number in found["numbers"]]

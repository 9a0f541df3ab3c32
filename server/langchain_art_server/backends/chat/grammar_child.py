"""Compiles grammars under limits of CPU time and memory. Run by its path, by `grammar_check`.

A process of its own because a schema can take llguidance minutes and gigabytes, or end its process
(1.9 has a stack overflow and a segmentation fault). Standard input has a JSON object with the
tokenizer and the limits, and then grammars; standard output an empty answer when the tokenizer is
loaded, and then one for each grammar: empty, or why it cannot be compiled. Before each of them
stands its length as four bytes, big-endian.
"""

from __future__ import annotations

import json
import math
import resource
import struct
import sys
import time
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

LENGTH = struct.Struct(">I")


def main() -> None:
    """Answer until standard input is closed."""
    setup = json.loads(_read())
    tokens = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["eos"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = _address_space() + setup["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    _write(b"")
    while grammar := _read():
        # A process is ended when it has used that many seconds in all.
        seconds = math.ceil(time.process_time() + setup["cpu"])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        matcher = LLMatcher(tokens, grammar.decode(), log_level=0)
        if not matcher.is_error():
            matcher.compute_logit_bias()  # the first step of the engine's
        _write(matcher.get_error().encode())


def _address_space() -> int:
    """Bytes of addresses that this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _read() -> bytes:
    head = sys.stdin.buffer.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    return sys.stdin.buffer.read(LENGTH.unpack(head)[0])


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

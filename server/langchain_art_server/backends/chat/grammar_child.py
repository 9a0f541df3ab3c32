"""Compiles grammars under limits of CPU time and memory. Run by its path, by `guided_decoding`.

A process of its own because a schema can take llguidance minutes and gigabytes, or end its process
(1.9 has a stack overflow and a segmentation fault). Standard input has a JSON object with the
tokenizer and the limit of memory, and then one for each question, with a ``grammar``, its seconds
of ``cpu`` and perhaps the tokens of a ``reply``; standard output an empty answer when the tokenizer
is loaded, and then one for each question: `_problem`, or of a reply `_masks`. Before each of them
stands its length as four bytes, big-endian.
"""

from __future__ import annotations

import json
import math
import resource
import struct
import sys
import time
from base64 import b64encode
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
    while frame := _read():
        asked = json.loads(frame)
        # A process is ended when it has used that many seconds in all.
        seconds = math.ceil(time.process_time() + asked["cpu"])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        matcher = LLMatcher(tokens, asked["grammar"], log_level=0)
        _write(_masks(matcher, asked["reply"]) if "reply" in asked else _problem(matcher))


def _problem(matcher: LLMatcher) -> bytes:
    """Reason why a grammar cannot be used; empty if it can."""
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first step of the engine's
    return matcher.get_error().encode()


def _masks(matcher: LLMatcher, reply: list[int]) -> bytes:
    """Bit masks of what is allowed at each token of a reply, each distinct mask once.

    JSON with the ``masks``, and the ``numbers`` of each token's mask; there are fewer of these than
    tokens if the grammar forbids one.
    """
    masks: dict[bytes, int] = {}
    numbers: list[int] = []
    for token in reply:
        numbers.append(masks.setdefault(matcher.compute_bitmask(), len(masks)))
        if not matcher.consume_token(token):
            numbers.pop()
            break
    found = {"masks": [b64encode(mask).decode() for mask in masks], "numbers": numbers}
    return json.dumps(found).encode()


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

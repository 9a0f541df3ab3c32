"""``benchmarks/gpu/carry.py``: other cards' code goes, and what is packed comes out as it was."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.gpu import carry


def entry(kind: int, card: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\1")
    return (head + struct.pack("<I", card)).ljust(64, b"\2") + code


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return carry.MAGIC + struct.pack("<Q", len(body)) + body


def test_a_card_keeps_its_own_code_or_the_newest_that_it_can_compile(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    parts = [
        b"ELF, and what is around",
        fat_binary(entry(2, 80, b"a" * 24), entry(2, 90, b"b" * 24), entry(1, 90, b"c" * 24)),
        b"between",
        fat_binary(entry(1, 75, b"d" * 24), entry(1, 80, b"e" * 24), entry(2, 100, b"f" * 24)),
        b"behind",
    ]
    library.write_bytes(b"".join(parts))
    assert carry.keep_only(library, 90) == 4 * 24
    left = library.read_bytes()
    assert len(left) == sum(map(len, parts))
    assert [letter for letter in b"abcdef" if bytes([letter]) * 24 in left] == list(b"be")
    for part in parts[::2]:
        assert part in left
    assert carry.keep_only(library, 90) == 4 * 24  # what is zero stays zero
    assert library.read_bytes() == left


def test_an_entry_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(fat_binary(entry(7, 90, b"x" * 24)))
    with pytest.raises(ValueError, match="got an entry of kind 7"):
        carry.keep_only(library, 90)


def test_pieces_are_unpacked_over_another_environment(tmp_path: Path) -> None:
    site, out, there = tmp_path / "site", tmp_path / "out", tmp_path / "there"
    (site / "carried").mkdir(parents=True)
    (site / "carried/__init__.py").write_text("VALUE = 7\n" + "#" * (3 << 20))
    (site / "carried/data.bin").write_bytes(bytes(range(256)) * 9000)
    argv = ["carry", str(site), str(out), "--piece-mib", "1"]
    with mock.patch.object(sys, "argv", argv):
        carry.main()
    sizes = [one.stat().st_size for one in sorted(out.glob("piece-*"))]
    assert sizes and max(sizes) <= 1 << 20
    script = ["sh", str(out / "unpack.sh"), sys.executable, str(there)]
    subprocess.run(script, check=True, capture_output=True, text=True)
    said = subprocess.run(
        [there / "bin/python", "-c", "import carried, pydantic; print(carried.VALUE)"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout == "7\n"
    (copied,) = there.rglob("data.bin")
    assert copied.read_bytes() == bytes(range(256)) * 9000

"""Packages for a GPU machine that reaches no registry: ``python -m benchmarks.gpu.carry SITE OUT``.

SITE is a folder of installed packages (``pip install --target``; the README beside this has the
commands). In its shared libraries, GPU code for other cards than ``--card`` is overwritten with
zeros: a library holds it for each card that it supports, and the driver loads that of its own. Then
everything is packed into pieces of ``--piece-mib``, small enough to be sent one by one, and
``OUT/unpack.sh``, which makes an environment of them there. Torch with CUDA, Triton and vLLM take
360 MB instead of 1.2 GB.

A fat binary is a header (magic number, version, size: ``fatbinary.h`` of the CUDA toolkit), and
entries, each with its kind (1: PTX, 2: machine code), a card's number (90 for Hopper) and a
size: as read off the libraries of torch 2.13 and vLLM 0.31.
"""

from __future__ import annotations

import argparse
import lzma
import mmap
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from rich.console import Console
from rich.progress import track

MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
PTX, MACHINE_CODE = 1, 2
UNPACK = """\
# sh unpack.sh PYTHON FOLDER: an environment in FOLDER, over that of PYTHON with its CUDA libraries.
set -e
here=$(dirname "$0"); there=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$1" -m venv --without-pip "$2"
site=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat "$here"/piece-* | xz -dc | tar -x -C "$site"
echo "$there" > "$site/zz_below.pth"
mkdir -p "$site/nvidia" "$site/torch/bin"
for folder in "$there"/nvidia/*; do
  test -e "$site/nvidia/$(basename "$folder")" || ln -s "$folder" "$site/nvidia/"
done
helper=torch/bin/torch_shm_manager
test -e "$site/$helper" || cp "$there/$helper" "$site/$helper"
"""
console = Console()


class Code(NamedTuple):
    """One card's code in a fat binary: its kind, the card, and where it is."""

    kind: int
    card: int
    start: int
    size: int


def fat_binaries(data: mmap.mmap) -> Iterator[list[Code]]:
    """The entries of each fat binary in a shared library."""
    at = data.find(MAGIC)
    while at >= 0:
        (length,) = struct.unpack_from("<Q", data, at + 8)
        begin, end, found = at + 16, at + 16 + length, list[Code]()
        while begin < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, begin)
            (card,) = struct.unpack_from("<I", data, begin + 28)
            if kind not in (PTX, MACHINE_CODE) or not 32 <= header <= 256:
                raise ValueError(f"got an entry of kind {kind} at {begin}, expected 1 or 2")
            found.append(Code(kind, card, begin + header, size))
            begin += header + size
        yield found
        at = data.find(MAGIC, end)


def others(codes: list[Code], card: int) -> list[Code]:
    """What a card never loads: all but its machine code or, without that, the newest PTX for it."""
    own = [one for one in codes if one.kind == MACHINE_CODE and one.card == card]
    texts = [one for one in codes if one.kind == PTX and one.card <= card]
    kept = own or sorted(texts, key=lambda one: one.card)[-1:]
    return [one for one in codes if one not in kept]


def keep_only(library: Path, card: int) -> int:
    """Overwrite other cards' code in a library with zeros; returns how many bytes."""
    lost = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for codes in fat_binaries(data):
            for one in others(codes, card):
                data[one.start : one.start + one.size] = bytes(one.size)
                lost += one.size
    return lost


class Pieces:
    """A stream that is written to files of at most so many bytes."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most, self._number = folder, most, 0
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> int:
        """Write all of it."""
        rest = memoryview(data)
        while rest:
            if self._file is None or self._file.tell() == self._most:
                self.close()
                self._file = (self._folder / f"piece-{self._number:03}").open("wb")
                self._number += 1
            room = self._most - self._file.tell()
            self._file.write(rest[:room])
            rest = rest[room:]
        return len(data)

    def close(self) -> None:
        """End the last file."""
        if self._file is not None:
            self._file.close()


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("site", type=Path, help="installed packages; its libraries are changed")
    asked.add_argument("out", type=Path, help="folder of the pieces; made")
    asked.add_argument("--card", type=int, default=90, help="compute capability without the dot")
    asked.add_argument("--piece-mib", type=int, default=50)
    given = asked.parse_args()
    out: Path = given.out
    out.mkdir(parents=True)
    libraries = [one for one in given.site.rglob("*.so*") if one.is_file() and one.stat().st_size]
    lost = sum(keep_only(one, given.card) for one in track(libraries, "other cards' code"))
    console.print(f"{lost / 1e6:,.0f} MB of code for other cards were overwritten.")
    pieces = Pieces(out, given.piece_mib << 20)
    with (
        lzma.open(pieces, "wb", preset=5) as packed,  # pyright: ignore[reportArgumentType]
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for one in track(sorted(given.site.iterdir()), "packing"):
            archive.add(one, one.name)
    pieces.close()
    (out / "unpack.sh").write_text(UNPACK)
    size = sum(one.stat().st_size for one in out.glob("piece-*"))
    console.print(f"{size / 1e6:,.0f} MB in {out}; there: sh unpack.sh PYTHON FOLDER")


if __name__ == "__main__":
    main()

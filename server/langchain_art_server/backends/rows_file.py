"""Rows on their way to a learner's process: one ``.npz`` file of flat arrays.

A file and not a frame: ten thousand rows of 350 tokens are some 90 MB, which a frame would encode
on the gateway's event loop and keep in memory for a resend. A file is written in a thread (half a
second), is named by its path in the call, outlives either process, and needs no pickle to read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from langchain_art.errors import InvalidRequest
from langchain_art_server.algorithms.samples import Row

_FIELDS = ("token_ids", "mask", "logprobs", "advantages")
_DTYPES = {"token_ids": "<i8", "mask": "u1", "logprobs": "<f8", "advantages": "<f8"}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to `path`, exactly: ids as int64, numbers as float64."""
    arrays = {
        name: np.fromiter(
            itertools.chain.from_iterable(getattr(row, name) for row in rows), dtype=_DTYPES[name]
        )
        for name in _FIELDS
    }
    arrays["lengths"] = np.array([len(row.token_ids) for row in rows], dtype="<i8")
    arrays["temperatures"] = np.array([row.temperature for row in rows], dtype="<f8")
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_rows(path: Path) -> list[Row]:
    """Read what `write_rows` wrote.

    Raises:
        InvalidRequest: the file is missing or is not one of ours.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*_FIELDS, "lengths", "temperatures")}
    except (OSError, ValueError, KeyError) as error:
        raise InvalidRequest(f"the rows in {path.name} cannot be read: {error}") from error
    ends = np.cumsum(arrays["lengths"]).tolist()
    columns = {name: arrays[name].tolist() for name in _FIELDS}
    return [
        Row(
            **{name: column[end - length : end] for name, column in columns.items()},
            temperature=temperature,
        )
        for end, length, temperature in zip(
            ends, arrays["lengths"].tolist(), arrays["temperatures"].tolist(), strict=True
        )
    ]

"""Learner steps between the server and the learner's process: JSON, and rows in an ``.npz`` file.

Rows go through a file because ten thousand rows of 350 tokens are some 90 MB, which a frame would
encode on the gateway's event loop and keep in memory for a resend. A file is written in a thread
(half a second) and needs no pickle to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from langchain_art.errors import InvalidRequest
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep

_step = TypeAdapter(LearnerStep)
#: Fields of `Row` with one number per token (or empty, where a row leaves it out).
_DTYPES = {
    "token_ids": "<i8",
    "mask": "u1",
    "logprobs": "<f8",
    "advantages": "<f8",
    "weights": "<f8",
    "calls": "<i8",
}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to `path`, exactly: ids as int64, numbers as float64."""
    arrays: dict[str, np.ndarray] = {}
    for name, dtype in _DTYPES.items():
        arrays |= _flat(name, dtype, [getattr(row, name) for row in rows])
    sets: dict[bytes, int] = {}
    numbers = [[sets.setdefault(one, len(sets)) for one in row.drawn_from] for row in rows]
    arrays |= _flat("drawn_from", "<i8", numbers)
    arrays["sets"] = np.frombuffer(b"".join(sets), dtype="u1")
    arrays["sets_lengths"] = np.array([len(one) for one in sets], dtype="<i8")
    images = {name: body for row in rows for name, body in row.images.items()}
    places = {name: at for at, name in enumerate(images)}
    arrays |= _flat("images", "<i8", [[places[name] for name in row.images] for row in rows])
    arrays["images_names"] = np.array(list(images), dtype="<U64")
    arrays["bodies"] = np.frombuffer(b"".join(images.values()), dtype="u1")
    arrays["bodies_lengths"] = np.array([len(one) for one in images.values()], dtype="<i8")
    arrays["temperatures"] = np.array([row.temperature for row in rows], dtype="<f8")
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_rows(path: Path) -> list[Row]:
    """Read what `write_rows` wrote. Raises InvalidRequest: it is missing, or not one of ours."""
    columns: dict[str, list[Any]] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            temperatures = file["temperatures"].tolist()
            for name in _DTYPES:
                columns[name] = _split(file, name, file[name].tolist())
            sets = _split(file, "sets", file["sets"].tobytes())
            numbers = _split(file, "drawn_from", file["drawn_from"].tolist())
            columns["drawn_from"] = [[sets[number] for number in row] for row in numbers]
            names = file["images_names"].tolist()
            shown = list(zip(names, _split(file, "bodies", file["bodies"].tobytes()), strict=True))
            numbers = _split(file, "images", file["images"].tolist())
            columns["images"] = [dict(shown[number] for number in row) for row in numbers]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InvalidRequest(f"the rows in {path.name} cannot be read: {error}") from error
    return [
        Row(**{name: column[index] for name, column in columns.items()}, temperature=temperature)
        for index, temperature in enumerate(temperatures)
    ]


def _flat(name: str, dtype: str, columns: Sequence[Sequence[float]]) -> dict[str, np.ndarray]:
    """A list for each row as two arrays: what is in the lists, and their lengths."""
    return {
        name: np.fromiter(chain.from_iterable(columns), dtype=dtype),
        f"{name}_lengths": np.array([len(column) for column in columns], dtype="<i8"),
    }


def _split(file: Mapping[str, np.ndarray], name: str, flat: Any) -> list[Any]:
    ends = np.cumsum(file[f"{name}_lengths"]).tolist()
    return [flat[start:end] for start, end in pairwise([0, *ends])]


def pack_step(step: LearnerStep, rows: Path) -> dict[str, Any]:
    """A step as JSON; its rows are in the file `rows`, which `write_rows` writes."""
    return _step.dump_python(step, mode="json", exclude={"rows"}) | {"rows": str(rows)}


def unpack_step(packed: dict[str, Any]) -> LearnerStep:
    """The step of `pack_step`, with its rows. Raises as `read_rows`."""
    step = _step.validate_python(packed | {"rows": []})
    return replace(step, rows=read_rows(Path(packed["rows"])))

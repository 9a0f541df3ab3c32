"""The data set of the example's MCP server: monthly climate normals of made-up weather stations.

``python -m examples.mcp_server.dataset climate.sqlite3`` writes it. It has the shape of the public
tables of normals that weather services publish: a table of stations, and for each station and month
the usual rain, sunshine and wind.
"""

from __future__ import annotations

import argparse
import random
import re
import sqlite3
from contextlib import closing
from pathlib import Path

# fmt: off
CITIES = (
    "Arvik", "Belmar", "Corda", "Dalby", "Estero", "Fjell", "Gravel", "Hamra", "Ilmen", "Jarna",
    "Kolding", "Larvo", "Mirow", "Norda", "Ostra", "Pavia", "Rosal", "Sintra", "Torsby", "Varde",
)
SITES = ("airport", "harbour", "forest", "hill", "park", "mill")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)
MEASURES = ("rain", "sun", "wind")
# fmt: on
SITES_PER_CITY = 3
_QUESTION = re.compile(
    rf"({'|'.join(MEASURES)}) .*?({'|'.join(CITIES)}) ({'|'.join(SITES)}) .*?({'|'.join(MONTHS)})"
)


def build(path: str | Path, seed: int = 0) -> Path:
    """Write the data set; a file that exists is replaced. The same seed gives the same content."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    rng = random.Random(f"climate-{seed}")
    stations = [(city, site) for city in CITIES for site in rng.sample(SITES, SITES_PER_CITY)]
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE stations (name TEXT PRIMARY KEY, city TEXT)")
        db.execute(
            "CREATE TABLE normals (station TEXT REFERENCES stations, month TEXT,"
            " rain INTEGER, sun INTEGER, wind INTEGER, PRIMARY KEY (station, month))"
        )
        for city, site in stations:
            name = f"{city} {site}"
            db.execute("INSERT INTO stations VALUES (?, ?)", (name, city))
            for month in MONTHS:
                values = rng.sample(range(10, 100), len(MEASURES))
                db.execute("INSERT INTO normals VALUES (?, ?, ?, ?, ?)", (name, month, *values))
    return path


def answer_of(database: Path, task: str) -> str | None:
    """The right answer to a task, or None if this example cannot tell what is asked for.

    It is what held-out tasks are measured with; training and the judge never see it.
    """
    found = _QUESTION.search(task)
    if found is None:
        return None
    measure, city, site, month = found.groups()
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        row = db.execute(
            f"SELECT {measure} FROM normals WHERE station = ? AND month = ?",
            (f"{city} {site}", month),
        ).fetchone()
    return None if row is None else f"{measure} {row[0]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.path, arguments.seed))

"""An MCP server over a SQLite file of climate normals: ``python server.py climate.sqlite3``.

It speaks MCP on standard input and output, as servers do that a desktop application starts, and
needs nothing of this repository.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Sequence
from typing import Any

from mcp.server.fastmcp import FastMCP
from mcp.types import ToolAnnotations

READ_ONLY = ToolAnnotations(readOnlyHint=True, openWorldHint=False)


def build_server(path: str) -> FastMCP[None]:
    """The server over the file at `path`, which is opened for reading only."""
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
    server: FastMCP[None] = FastMCP("climate", log_level="WARNING")

    def rows(sql: str, *values: object) -> Sequence[tuple[Any, ...]]:
        return db.execute(sql, values).fetchall()

    @server.tool(annotations=READ_ONLY, structured_output=False)
    def stations(city: str) -> str:
        """List the stations of a city."""
        found = rows("SELECT name FROM stations WHERE city = ? COLLATE NOCASE", city)
        return "\n".join(name for (name,) in found) or "None."

    @server.tool(annotations=READ_ONLY, structured_output=False)
    def normals(station: str, month: str) -> str:
        """Read what is usual at a station in a month."""
        found = rows(
            "SELECT station, month, rain, sun, wind FROM normals"
            " WHERE station = ? COLLATE NOCASE AND month = ? COLLATE NOCASE",
            station,
            month,
        )
        if not found:
            return "None."
        name, when, rain, sun, wind = found[0]
        return f"{name}, {when}\nrain {rain}, sun {sun}, wind {wind}"

    @server.resource("climate://overview", mime_type="text/plain")
    def overview() -> str:
        """What the data set is about: stations, months and what is measured."""
        named = [name for (name,) in rows("SELECT name FROM stations")]
        months = [month for (month,) in rows("SELECT DISTINCT month FROM normals ORDER BY rowid")]
        return "\n".join(
            [
                f"stations: {', '.join(named)}",
                f"months: {', '.join(months)}",
                "measures: rain (mm), sun (%), wind (km/h)",
            ]
        )

    return server


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python server.py climate.sqlite3")
    build_server(sys.argv[1]).run("stdio")

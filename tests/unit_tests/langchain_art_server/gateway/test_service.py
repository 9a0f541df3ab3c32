from pathlib import Path
from typing import Any, cast

import pytest

from langchain_art.errors import ConfigError
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service


@pytest.mark.parametrize("blocked", ["", "data", "data/adapters", "data/lock"])
def test_a_data_directory_that_cannot_be_written_to_is_refused(
    tmp_path: Path, blocked: str
) -> None:
    """By a file where a directory must be, or the reverse, which stop root too."""
    data = tmp_path / "data" / "below"
    if blocked == "data/lock":
        (tmp_path / "data" / "below" / "lock").mkdir(parents=True)
    elif blocked == "data/adapters":
        data.mkdir(parents=True)
        (data / "adapters").write_text("")
    elif blocked:
        (tmp_path / blocked).write_text("")
    else:
        data = Path("/proc/nowhere/data")
    engine = cast("Any", None)
    with pytest.raises(ConfigError, match=r"got data_dir='.*', expected a directory that this"):
        Service(Settings(model="none", data_dir=data), engine, engine)

"""What examples bring along: settings for a server, and scripts that make a base model."""

from importlib import import_module
from pathlib import Path

import pytest

from examples.support import tiny_model
from langchain_art_server.config import load_settings
from tests.support.examples import require_same_base
from tests.support.live_server import REPO, ForkedServer
from tests.support.soak import in_soak_alone, share

#: Base models whose recipes differ from the other two's in conversations and template alone.
IN_SOAK = ("deep_agent", "temporal_clue")
FILES = sorted((REPO / "examples").glob("*/server.toml"))


@pytest.mark.parametrize("name", [path.parent.name for path in FILES])
def test_they_are_accepted_and_of_the_demos_policies(name: str) -> None:
    settings = load_settings(REPO / "examples" / name / "server.toml")
    assert settings.policies == import_module(f"examples.{name}.train").DEMO.policies


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "codenames",
        pytest.param("email_search", marks=pytest.mark.soak),  # which serves what it has made
        *map(in_soak_alone, IN_SOAK),
    ],
)
def test_the_script_still_builds_the_base_model(name: str, tmp_path: Path) -> None:
    recipe = import_module(f"examples.{name}.build_base_model").RECIPE
    tiny_model.main(recipe, tmp_path, ["--smoke"])
    require_same_base(tmp_path, import_module(f"examples.{name}.train").BASE_MODEL)
    if name == "email_search" and share():
        ForkedServer(tmp_path / "data", model=tmp_path).start().stop()

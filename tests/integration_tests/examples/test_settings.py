"""The settings for a server that each example brings along."""

from __future__ import annotations

from importlib import import_module

import pytest

from langchain_art_server.config import load_settings
from tests.support.live_server import REPO

FILES = sorted((REPO / "examples").glob("*/server.toml"))


@pytest.mark.parametrize("name", [path.parent.name for path in FILES])
def test_they_are_accepted_and_of_the_demos_policies(name: str) -> None:
    settings = load_settings(REPO / "examples" / name / "server.toml")
    assert settings.policies == import_module(f"examples.{name}.train").DEMO.policies

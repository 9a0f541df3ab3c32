import pytest

from langchain_art import ArtClient
from langchain_art.errors import ConfigError


def test_what_cannot_be_trained_on_is_said_in_words() -> None:
    with ArtClient("http://127.0.0.1:9/v1") as client, pytest.raises(ConfigError) as raised:
        client.train([["run"]], "policy", rewards={"run": float("nan")})
    said = str(raised.value)
    assert said.startswith("This cannot be trained on: rewards.run: got nan, expected")
    assert "pydantic" not in said

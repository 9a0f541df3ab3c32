"""A misspelled option is answered with the one that may have been meant, on each way in."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from langchain_art.errors import ConfigError
from langchain_art.wire import LoraConfig, PolicySpec, TrainConfig, TrainRequest
from langchain_art.wire.field_hints import in_words
from langchain_art_server.gateway.chat.request import ChatBody
from langchain_art_server.gateway.refusals import refuse

ORDER = {"policy": "p", "groups": [["a"]]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"learning_rte": 1e-3}, "learning_rte: .* did you mean learning_rate?"),
        ({"lr": 1e-3}, "lr: .* did you mean learning_rate?"),
        (
            {"loss": {"importance_sampling": {"kind": "icepop", "hihg": 2.0}, "kind": "gspo"}},
            "loss.importance_sampling.hihg: .* did you mean high?",
        ),
        ({"zzz": 1}, "zzz: .* leave it out, or take one of .*learning_rate"),
        ({"learning_rate": 5}, r"learning_rate: .* less than or equal to 0.1 \(got 5\)"),
    ],
    ids=str,
)
def test_a_config_says_what_may_have_been_meant(config: dict[str, Any], words: str) -> None:
    words = words.replace("?", r"\?")
    with pytest.raises(ConfigError, match=f"^TrainConfig: {words}"):
        TrainConfig(**config)
    with pytest.raises(ValidationError) as bad:
        TrainRequest.model_validate(ORDER | {"config": config})
    refused = refuse(bad.value.errors(), TrainRequest)
    assert refused.param == "config"
    assert re.match(f"config.{words}", str(refused))


def test_a_field_of_a_body_too() -> None:
    for kind, body, words in (
        (TrainRequest, ORDER | {"trainabel": {}}, "did you mean trainable?"),
        (ChatBody, {"model": "m", "messages": [{}], "temprature": 1}, "did you mean temperature?"),
        (ChatBody, {"model": "m", "messages": [{}], "art": {"nod": "a"}}, "art.nod: "),
    ):
        with pytest.raises(ValidationError) as bad:
            kind.model_validate(body)
        assert words in str(refuse(bad.value.errors(), kind))
        assert words in in_words(bad.value, kind)


def test_each_group_of_settings_is_checked_where_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"^LoraConfig: rnk: .* did you mean rank"):
        LoraConfig(rnk=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match=r"^PolicySpec: name: got 'My Agent', expected a"):
        PolicySpec(name="My Agent")

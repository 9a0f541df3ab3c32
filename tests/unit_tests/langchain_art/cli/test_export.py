from typing import Any

import pytest

from langchain_art.cli.export import card
from langchain_art.wire.policies import Checkpoint


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("excluded", "loader"),
    [
        (None, "AutoModelForCausalLM"),
        (r"(?!model\.language_model\.).*", "AutoModelForImageTextToText"),
    ],
)
def test_the_card_loads_the_base_by_the_class_that_the_adapter_has_names_of(
    excluded: str | None, loader: str, merged: bool
) -> None:
    made = Checkpoint(policy="mail", version=3, name="mail@3", parent=2, created_at=0.0, bytes=1)
    config: dict[str, Any] = {"r": 8, "lora_alpha": 16, "exclude_modules": excluded}
    said = card(made, config | {"target_modules": ["q_proj"]}, "org/base", "", merged=merged)
    assert f"{loader}.from_pretrained(" in said
    assert said.count("AutoModelFor") == said.count(loader)


def test_the_card_of_a_version_that_was_not_trained_says_so() -> None:
    made = Checkpoint(policy="mail", version=0, name="mail@0", parent=None, created_at=0.0, bytes=1)
    said = card(made, {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}, "org/base", "")
    assert "it is not trained" in said and "trained by" not in said

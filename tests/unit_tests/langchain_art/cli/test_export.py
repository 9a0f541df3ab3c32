from typing import Any

from langchain_art.cli.export import card
from langchain_art.wire.policies import Checkpoint


def test_the_card_loads_the_base_by_its_class_and_says_if_it_is_not_trained() -> None:
    known: Any = {"policy": "mail", "created_at": 0.0, "bytes": 1}
    made = Checkpoint(version=3, name="mail@3", parent=2, **known)
    config: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    for excluded, loader in (
        (None, "AutoModelForCausalLM"),
        (r"(?!model\.language_model\.).*", "AutoModelForImageTextToText"),
    ):
        said = card(made, config | {"exclude_modules": excluded}, "org/base", "", merged=True)
        assert f"{loader}.from_pretrained(" in said
        assert said.count("AutoModelFor") == said.count(loader)
    first = Checkpoint(version=0, name="mail@0", parent=None, **known)
    said = card(first, config, "org/base", "")
    assert "it is not trained" in said and "trained by" not in said

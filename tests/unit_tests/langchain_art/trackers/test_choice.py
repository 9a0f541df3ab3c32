import importlib.util
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art.trackers import choice
from langchain_art.trackers.choice import KNOWN, chosen_trackers
from langchain_art.trackers.wandb_tracker import WandbTracker
from langchain_art.training.trainer import Trainer

VARIABLES = ("WANDB_PROJECT", "WANDB_MODE")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def names(trackers: Any) -> list[str]:
    return [one.name for one in chosen_trackers(trackers)]


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_environment_alone_asks_for_wandb(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    assert names(None) == []
    monkeypatch.setenv(variable, "offline")
    assert names(None) == ["wandb"]
    assert names([]) == [], "an empty list asks for none"
    assert names(["tensorboard"]) == ["tensorboard"]
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert names(None) == []


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer("p", trackers=["tensorbord"])
    assert all(name in str(caught.value) for name in ("'tensorbord'", *KNOWN))
    with pytest.raises(ConfigError, match=r"expected a list: trackers=\['wandb'\]"):
        chosen_trackers("wandb")
    with pytest.raises(ConfigError, match="each only once"):
        chosen_trackers(["wandb", WandbTracker()])
    with pytest.raises(ConfigError, match="an object with the methods start, log, keep, finish"):
        chosen_trackers([object()])  # type: ignore[list-item]
    has: dict[str, Any] = dict.fromkeys(("start", "log", "keep", "finish"), print)
    assert names([SimpleNamespace(**has, name="mine", settles=0.0)]) == ["mine"]
    for known in ({"name": "mine"}, {"settles": 0.0}):  # without them the thread or fit would end
        with pytest.raises(ConfigError, match="a text `name` and a number `settles`"):
            chosen_trackers([SimpleNamespace(**has, **known)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="got the W&B mode 'offlin'"):
        WandbTracker(mode="offlin")


@pytest.mark.parametrize(
    ("name", "missing", "install"),
    [
        ("wandb", {"wandb"}, "pip install 'langchain-art[wandb]'"),
        ("comet_ml", {"comet_ml"}, "pip install 'langchain-art[trackers]' comet-ml"),
        ("tensorboard", {"accelerate"}, "pip install 'langchain-art[trackers]'."),
    ],
)
def test_a_missing_package_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, missing: set[str], install: str
) -> None:
    def find_spec(module: str) -> ModuleSpec | None:
        if module not in missing:
            return importlib.util.find_spec("json")
        return ModuleSpec(module, None) if module == "wandb" else None  # a folder ./wandb

    monkeypatch.setattr(choice, "find_spec", find_spec)
    with pytest.raises(ConfigError) as caught:
        Trainer("p", trackers=[name])
    assert install in str(caught.value)

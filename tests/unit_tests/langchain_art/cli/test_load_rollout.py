"""A rollout of the command line calls the asked version, however it holds its model."""

import sys
from pathlib import Path

import pytest

from langchain_art import ChatART
from langchain_art.cli.load_rollout import load_rollout
from langchain_art.errors import ConfigError

HEAD = """
from langchain.agents import create_agent
from langchain_art import ChatART
from pydantic import BaseModel

class Answer(BaseModel):
    text: str

def search(text: str) -> str:
    "Search."
    return text

def made(**more): return ChatART(model="p", max_tokens=3, **more)
"""
FORMS = {
    "structured": "m = made().with_structured_output(Answer)\ndef rollout(s): m.invoke(s)",
    "fallbacks": "m = ChatART(model='other').with_fallbacks([made()])\ndef rollout(s): m.invoke(s)",
    "agent": "m = create_agent(made(), [search])\ndef rollout(s): m.invoke(s)",
    "object": "class Agent:\n    def __init__(self): self.model = made()\n"
    "    def rollout(self, s): self.model.invoke(s)\nrollout = Agent().rollout",
    "class": "class Agent:\n    model = made()\n"
    "    def __call__(self, s): self.model.invoke(s)\nrollout = Agent()",
    "closure": "def build():\n    m = made().bind_tools([search])\n"
    "    def rollout(s): m.invoke(s)\n    return rollout\nrollout = build()",
    "pinned": "m = made().bind_tools([search])\nm.bound.model_name = 'p@2'\n"
    "def rollout(s): m.invoke(s)",
    "beside": "m = made().bind_tools([search])\ndef rollout(s, model): m.invoke(s)",
    "elsewhere": "import forms_elsewhere\ndef rollout(s): forms_elsewhere.m.invoke(s)",
}


def asked_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def note(self: ChatART, *_: object, **__: object) -> object:
        found.append(self.model_name)
        raise ConnectionError("no server")

    monkeypatch.setattr(ChatART, "_generate", note)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_its_model(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"forms_{form}_mod"
    (tmp_path / f"{name}.py").write_text(HEAD + FORMS[form])
    (tmp_path / "forms_elsewhere.py").write_text(HEAD + "m = made().bind_tools([search])")
    loaded = load_rollout(f"{name}:rollout", "p@8", None, tmp_path)
    asked = asked_models(monkeypatch)
    try:
        with pytest.raises(ConnectionError):
            question = "q" if form != "agent" else {"messages": [("user", "q")]}
            loaded.rollout(question)  # type: ignore[operator]
    finally:
        sys.modules.pop("forms_elsewhere", None)
    assert set(asked) == {"p@8"} if form != "fallbacks" else asked == ["other", "p@8"]
    assert loaded.model is not None and loaded.model.max_tokens == 3


def test_models_of_other_names_stay_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forms_judge_mod.py").write_text(
        HEAD + "judge = ChatART(model='judge').bind_tools([search])\ndef rollout(s): return 1.0"
    )
    loaded = load_rollout("forms_judge_mod:rollout", "p@8", None, tmp_path)
    assert loaded.model is None
    assert "calls no ChatART of p that could be found, only ['judge']" in loaded.notes[0]
    assert sys.modules["forms_judge_mod"].judge.bound.model_name == "judge"


def test_the_command_line_asks_for_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_graph_mod.py").write_text(
        "from langchain_core.runnables import RunnableLambda\ngraph = RunnableLambda(len)\n"
    )
    with pytest.raises(ConfigError, match="brings no reward"):
        load_rollout("my_graph_mod:graph", "p", None, tmp_path)

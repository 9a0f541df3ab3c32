"""Replies that were not sampled here, as tokens: exactly what the template adds, or a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from langchain_art.errors import ConfigError
from langchain_art_server.backends.base import Demonstration, TokenTurn
from langchain_art_server.backends.peft.learner_core import token_turns
from tests.support.tiny_models import WEATHER, LocalSampler, ask, save_model, tokenizer

USER = {"role": "user", "content": "How is the team?"}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


class Model:
    """A tiny model whose chat template can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = save_model(path)
        self.base = AutoModelForCausalLM.from_pretrained(self.path)

    def template(self, text: str) -> None:
        (self.path / "chat_template.jinja").write_text(text)

    def turns(self, *turns: Demonstration) -> list[TokenTurn | str]:
        return token_turns(str(self.path), self.base, turns)

    def turn(self, reply: dict[str, Any], *messages: dict[str, Any], **more: Any) -> Any:
        [found] = self.turns(Demonstration([USER, *messages], more.get("tools", []), reply))
        return found


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


def text(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False)


def test_a_reply_is_what_the_template_adds_up_to_the_end_of_turn(model: Model) -> None:
    turn = model.turn(said("The team is well."))
    assert text(turn.prompt_token_ids).endswith("<|im_start|>assistant\n")
    assert text(turn.token_ids) == "The team is well.<|im_end|>"
    one = {"name": "weather", "arguments": json.dumps({"city": "Paris", "days": 2})}
    call = said("", tool_calls=[{"id": "c", "type": "function", "function": one}])
    turn = model.turn(call, tools=[WEATHER])
    assert '"name": "weather"' in text(turn.prompt_token_ids)  # the tools are shown
    assert text(turn.token_ids).startswith("<tool_call>") and "Paris" in text(turn.token_ids)
    assert text(turn.token_ids).endswith("</tool_call><|im_end|>")
    # The prompt is the one that the sampler shows.
    [reply] = LocalSampler(model.path).chat(ask(USER["content"], max_tokens=4))
    assert model.turn(said("x")).prompt_token_ids == list(reply.prompt_token_ids)


def test_turns_go_on_with_the_tokens_of_those_before(model: Model) -> None:
    first, more = said("Well."), {"role": "user", "content": "And the weather?"}
    one, two = model.turns(
        Demonstration([USER], [], first), Demonstration([USER, first, more], [], said("Rain."))
    )
    assert isinstance(one, TokenTurn) and isinstance(two, TokenTurn)
    so_far = [*one.prompt_token_ids, *one.token_ids]
    assert two.prompt_token_ids[: len(so_far)] == so_far
    assert text(two.token_ids) == "Rain.<|im_end|>"


def test_a_token_never_spans_the_border_of_prompt_and_reply(model: Model) -> None:
    """A sampler goes on after the prompt's tokens; and later turns keep what it would have said."""
    model.template(
        "{% for m in messages %}<|im_start|>{{ m.role }} t{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant t{% endif %}"
    )
    first, more = said("he team"), {"role": "user", "content": "So?"}
    one, two = model.turns(
        Demonstration([USER], [], first), Demonstration([USER, first, more], [], said("he mail"))
    )
    assert isinstance(one, TokenTurn) and isinstance(two, TokenTurn)
    ids = [*one.prompt_token_ids, *one.token_ids]
    joined = tokenizer().encode(text(ids), add_special_tokens=False)
    assert text(one.token_ids) == "he team<|im_end|>" and len(joined) < len(ids)
    assert two.prompt_token_ids[: len(ids)] == ids


def test_a_template_that_rewrites_the_prompt_is_refused(model: Model) -> None:
    model.template(  # it marks the user's message once there is an answer
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'user' and not loop.last %}!{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    why = model.turn(said("Well."))
    assert "differently when a reply follows" in why and "!<|im_end|>" in why


@pytest.mark.parametrize("shown", ["{{ m.content }}\n", "{{ m.content }}<|im_end|>\nP.S."])
def test_a_reply_without_an_end_of_its_own_is_refused(model: Model, shown: str) -> None:
    model.template(
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{shown}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    why = model.turn(said("Well."))
    assert "expected one turn" in why and "would not learn to stop" in why


def test_what_is_refused_is_said_of_its_turn_alone(model: Model) -> None:
    assert "would learn to stop there" in model.turn(said("Well.<|im_end|>\n<|im_start|>user\nNo."))
    good = Demonstration([USER], [], said("Well."))
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    found = model.turns(good, Demonstration([image], [], said("A cat.")), good)
    assert isinstance(found[1], str) and "image_url" in found[1]
    assert found[0] == found[2] == model.turn(said("Well."))
    (model.path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        model.turn(said("Well."))

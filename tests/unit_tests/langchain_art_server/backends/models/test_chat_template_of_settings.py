"""``--chat-template``: tools as text before templates that show none, or a file in their place."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.chat.tool_calls.formats import HERMES
from langchain_art_server.backends.models.loading import eos_ids, load_outline, load_tokenizer
from langchain_art_server.config import Settings, load_settings
from tests.support.tiny_models import WEATHER, save_model, tokenizer

#: As they stand in the tokenizers of SmolLM2, Phi-3, Gemma 3 and Gemma 2.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + "
    "message['content'] + '<|im_end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + "
    "message['content'] + '<|im_end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|im_end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
TURNS = (
    "{%% if messages[0]['role'] == 'system' %%}%s{%% endif %%}"
    "{%% for message in rest %%}{%% if (message['role'] == 'user') != (loop.index0 %% 2 == 0) %%}"
    "{{ raise_exception('Conversation roles must alternate') }}{%% endif %%}"
    "{{ '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' ~ "
    "(prefix if loop.first else '') ~ (message.content if message.content is string else "
    "message.content[0].text) | trim ~ '<|im_end|>\n' }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<start_of_turn>model\n' }}{%% endif %%}"
)
GEMMA3 = "{% set rest, prefix = messages, '' %}" + TURNS % (
    "{% set rest, prefix = messages[1:], (messages[0].content if messages[0].content is string "
    "else messages[0].content[0].text) ~ '\n\n' %}"
)
GEMMA2 = "{% set rest, prefix = messages, '' %}" + TURNS % (
    "{{ raise_exception('System role not supported') }}"
)
TEMPLATES = {
    "smollm2": SMOLLM2,
    "phi3": PHI3,
    "gemma3": GEMMA3,
    "gemma2": GEMMA2,
    "named": {"default": SMOLLM2, "other": "{{ messages }}"},
}
CALLS = [
    {
        "id": f"c{day}",
        "type": "function",
        "function": {"name": "weather", "arguments": f'{{"city": "Zoë", "days": {day}}}'},
    }
    for day in (1, 2)
]
SYSTEM, USER = ({"role": role, "content": f"{role} said"} for role in ("system", "user"))
RESULTS = [{"role": "tool", "tool_call_id": f"c{day}", "content": f"sunny {day}"} for day in (1, 2)]
END = {"role": "assistant", "content": "It is sunny."}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("plain"))


def saved(plain: Path, own: Any) -> Path:
    made = tokenizer().__class__.from_pretrained(plain)
    made.chat_template, made.eos_token = own, "<|im_end|>"
    for file in plain.glob("**/*.jinja"):
        file.unlink()
    made.save_pretrained(plain)
    return plain


def of(plain: Path, own: Any) -> tuple[ChatTemplate, ChatTemplate]:
    """Without the option, and with it."""
    path = str(saved(plain, own))
    model = load_outline(Settings(model=path, device="cpu")).model
    bare, shown = (load_tokenizer(path, name) for name in (None, "tools"))
    return ChatTemplate(bare, eos_ids(model, bare)), ChatTemplate(shown, eos_ids(model, shown))


@pytest.mark.parametrize("own", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_without_tools_shows_them_as_hermes_does(own: Any, plain: Path) -> None:
    bare, shown = of(plain, own)
    with pytest.raises(InvalidRequest, match="--chat-template tools"):
        bare.prompt([USER], [WEATHER])
    assert shown.tools is HERMES
    for before in [USER], [SYSTEM, USER]:
        try:
            without = bare.prompt(before, []).text
        except InvalidRequest:
            assert own is GEMMA2 and len(before) == 2
            continue
        assert shown.prompt(before, []).text == without
        text = shown.prompt(before, [WEATHER]).text
        assert text.count("\n<tools>\n") == 1 and text.index("<tools>") < text.index("user said")
        assert json.dumps(WEATHER, ensure_ascii=False) in text
        assert all(message["content"] in text for message in before)
        parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in before]
        assert shown.prompt(parts, [WEATHER]).text == text
    # Calls and results are read back, and prompts go on.
    first = shown.prompt([USER], [WEATHER])
    called = {"role": "assistant", "content": "", "tool_calls": CALLS}
    reply = shown.reply_ids(first, called)
    text = shown.text(reply)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Zoë", "days": 1}}\n' in text
    shown.remember(first, reply, called)
    second = shown.prompt([USER, called, *RESULTS], [WEATHER])
    assert second.ids[: len(first.ids) + len(reply)] == [*first.ids, *reply]
    assert (
        "<tool_response>\nsunny 1\n</tool_response>\n<tool_response>\nsunny 2\n</tool_response>"
        in second.text
    )
    third = shown.prompt([USER, called, *RESULTS, END, USER], [WEATHER])
    assert third.text.startswith(second.text) and third.text.count("user said") == 2


def test_a_file_takes_the_place_of_the_models_own(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}")
    given = load_settings(model=str(plain), chat_template=str(file))
    assert given.chat_template == file.read_text()
    child = Settings.model_validate(given.model_dump(mode="json"))  # as it goes to an engine
    assert child == given and load_outline(child).tokenizer.chat_template == file.read_text()
    ids = [Settings(model="m", chat_template=one).template_id for one in (None, "tools", "{{ x }}")]
    assert ids[0] is None and len({*ids, given.template_id}) == 4
    assert len({Settings(model="m", chat_template=t).alike_in_words for t in (None, "tools")}) == 2


def test_what_is_no_template_is_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jinja").write_text("none")
    for name, why in (("tool", "No such file"), (tmp_path / "empty.jinja", "no expression")):
        with pytest.raises(
            ConfigError, match=f"chat_template: .*expected 'tools' or a file.*{why}"
        ):
            load_settings(model="m", chat_template=str(name))
    for file in plain.glob("**/*.jinja"):
        file.unlink()
    made = tokenizer().__class__.from_pretrained(plain)
    made.chat_template = None
    made.save_pretrained(plain)
    with pytest.raises(ConfigError, match="has no chat template for it to go before"):
        load_tokenizer(str(plain), "tools")


def test_a_template_without_the_token_that_begins_texts_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path / "model")
    made = AutoTokenizer.from_pretrained(folder)
    made.bos_token = "<|im_start|>"
    first = ("<|im_start|>", made.bos_token_id)
    made.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, [first])
    made.save_pretrained(folder)
    settings = Settings(model=str(folder), device="cpu")
    for template, told in ((GEMMA3, True), ("{{ bos_token }}" + GEMMA3, False), (SMOLLM2, False)):
        caplog.clear()
        load_outline(settings.model_copy(update={"chat_template": template}))
        assert ("{{ bos_token }} at the template's beginning" in caplog.text) == told, template
    made.backend_tokenizer.post_processor = TemplateProcessing("$A", None, [])
    made.save_pretrained(folder)
    load_outline(settings.model_copy(update={"chat_template": GEMMA3}))
    assert not caplog.text, "a tokenizer that begins texts with none"

"""Nothing that a message says is lost in the prompt: it comes out, or is refused by name."""

import copy
import itertools
import random
import re
import tracemalloc
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art_server.backends.chat import chat_template
from langchain_art_server.backends.chat.chat_template import ChatTemplate, KeptText, KeptTokens
from langchain_art_server.backends.models.loading import eos_ids
from tests.support.soak import count
from tests.support.tiny_models import CHATML, WEATHER, tokenizer

SEEDS = range(count(40, 2000))
SAYS = "{{ message.content }}"
PARTS = "{% for part in message.content %}{{ part.text }}{% endfor %}"
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "probe1234",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
        }
    ],
}
#: Each message says its place.
CONVERSATIONS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "system", "user"),
    ("user", "call", "tool"),
    ("user", "call", "tool", "assistant", "user"),
)


def of(source: Any) -> ChatTemplate:
    made = copy.copy(tokenizer())
    made.chat_template = source
    return ChatTemplate(made, {made.added_tokens_encoder["<|im_end|>"]})


def told(at: int) -> str:
    return f"said{at}here"


def conversation(roles: tuple[str, ...], *, parts: bool) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for at, role in enumerate(roles):
        content = [{"type": "text", "text": told(at)}] if parts else told(at)
        one = CALLED if role == "call" else {"role": role, "content": content}
        said.append(one | {"tool_call_id": "probe1234"} if role == "tool" else one)
    return said


def silently_lost(template: ChatTemplate) -> list[tuple[tuple[str, ...], bool, bool]]:
    """Conversations of which a message does not come out, and nobody says so."""
    lost: list[tuple[tuple[str, ...], bool, bool]] = []
    for roles in CONVERSATIONS:
        places = [at for at, role in enumerate(roles) if role != "call"]
        for parts in (False, True):
            for tools in ([], [WEATHER]):
                try:
                    text = template.prompt(conversation(roles, parts=parts), tools).text
                except InvalidRequest:
                    continue
                if not all(told(at) in text for at in places):
                    lost.append((roles, parts, bool(tools)))
    return lost


@pytest.mark.parametrize("roles", CONVERSATIONS)
def test_a_template_of_parts_shows_texts(roles: tuple[str, ...]) -> None:
    of_parts, of_texts = of(CHATML.replace(SAYS, PARTS)), of(CHATML)
    for parts, tools in itertools.product((False, True), ([], [WEATHER])):
        said = conversation(roles, parts=parts)
        text = of_parts.prompt(said, tools).text
        assert text == of_texts.prompt(said, tools).text and "'type'" not in text
        assert all(told(at) in text for at, role in enumerate(roles) if role != "call")


def test_a_turn_of_parts_ends_with_its_token_alone() -> None:
    model = SimpleNamespace(
        generation_config=None,
        config=None,
        get_input_embeddings=lambda: torch.nn.Embedding(1000, 2),
        get_output_embeddings=lambda: torch.nn.Linear(2, 1000),
    )
    made: Any = copy.copy(tokenizer())
    ends = set[frozenset[int]]()
    for says in (SAYS, PARTS):
        made.chat_template = CHATML.replace(SAYS, says)
        ends.add(frozenset(eos_ids(model, made)))
    assert ends == {frozenset({made.eos_token_id, made.added_tokens_encoder["<|im_end|>"]})}


def test_a_supervised_reply_is_trained_whole() -> None:
    template = of(CHATML.replace(SAYS, PARTS))
    prompt = template.prompt([{"role": "user", "content": "x"}], [])
    ids = template.reply_ids(prompt, {"role": "assistant", "content": "the weather"})
    assert template.text(ids) == "the weather<|im_end|>"


def test_parts_stay_apart_where_the_template_parts_them() -> None:
    source = CHATML.replace(SAYS, PARTS.replace("part.text", "part.text ~ '|'"))
    said = [{"role": "user", "content": [{"type": "text", "text": one} for one in ("a", "b")]}]
    plain: Any = copy.copy(tokenizer())
    plain.chat_template = source
    expected = plain.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert of(source).prompt(said, []).text == expected


#: What a template does with a message's content, and whether transformers shows the whole of it.
SHOWN = (
    SAYS,
    PARTS,
    "{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}",
    "{{ message.content | map(attribute='text') | join }}",
    "{{ message['content'][0]['text'] }}",
    "{% for p in message.content if p.type == 'text' %}{{ p['text'] }}{% endfor %}",
    "{{ message.content | trim }}",
    "{% if message.content is string %}{{ raise_exception('parts only') }}{% endif %}" + PARTS,
    "{% if message.content is not string %}{{ raise_exception('text only') }}{% endif %}" + SAYS,
)
LOST = (
    "",
    "{{ message.text }}",
    "{{ message.content[:3] }}",
    "{% for p in message.content if p.type == 'image' %}{{ p['text'] }}{% endfor %}",
    "{% if loop.last %}{{ message.content }}{% endif %}",
    "{% if loop.first %}{{ message.content }}{% endif %}",
    "{% if not tools %}{{ message.content }}{% endif %}",
    "{% if tools %}{{ message.content }}{% endif %}",
)
REFUSED = ("{{ raise_exception('this role is not supported') }}", "{{ message.content.x.y }}")
ROLES = ("system", "user", "assistant", "tool")


def drawn(rng: random.Random) -> tuple[str, bool]:
    """A template, and whether each role is shown by it in one shape at least."""
    damaged = rng.random() < 0.6
    kinds = (SHOWN, SHOWN, SHOWN, LOST, REFUSED) if damaged else (SHOWN,)
    says = {role: rng.choice(rng.choice(kinds)) for role in ROLES}
    cases = "".join(
        f"{{% {'elif' if at else 'if'} message.role == '{role}' %}}{say}"
        for at, (role, say) in enumerate(says.items())
    )
    source = CHATML.replace(SAYS, cases + "{% endif %}")
    if damaged and rng.random() < 0.1:
        source = source.replace("endfor", "endfo", 1)
    return source, not damaged


@pytest.mark.parametrize("seed", SEEDS)
def test_each_message_comes_out_or_is_refused(seed: int) -> None:
    source, whole = drawn(random.Random(seed))
    try:
        template = of(source)
    except ConfigError as error:
        assert not whole
        assert len(str(error).splitlines()) == 1 and "chat template" in str(error)
        return
    assert silently_lost(template) == []
    for roles in CONVERSATIONS:  # what transformers shows in one shape of two is not refused
        if whole:
            assert template.prompt(conversation(roles, parts=True), []).text


@pytest.mark.parametrize(("role", "say"), [("user", ""), ("assistant", LOST[1])])
def test_a_template_without_the_user_or_the_replies_is_refused(role: str, say: str) -> None:
    shown = f"{{% if message.role == '{role}' %}}{say}{{% else %}}{SAYS}{{% endif %}}"
    with pytest.raises(ConfigError, match=f"chat template.*'{role}'"):
        of(CHATML.replace(SAYS, shown))


@pytest.mark.parametrize(
    ("left_out", "roles", "words"),
    [
        ("message.role == 'system'", ("system", "user"), "role 'system'"),
        ("message.role == 'tool'", ("user", "call", "tool"), "role 'tool'"),
        (
            "message.role == 'system' and message != messages[0]",
            ("user", "assistant", "system", "user"),
            "first message",
        ),
    ],
)
def test_a_role_that_the_template_leaves_out_is_refused_by_name(
    left_out: str, roles: tuple[str, ...], words: str
) -> None:
    """Other conversations are served."""
    shown = f"for message in messages if not ({left_out})"
    template = of(CHATML.replace("for message in messages", shown))
    with pytest.raises(InvalidRequest, match=words) as refused:
        template.prompt(conversation(roles, parts=False), [])
    at = next(at for at, role in enumerate(roles) if role in ("system", "tool"))
    assert refused.value.param == f"messages[{at}]"
    said = conversation(("user", "assistant", "user"), parts=False)
    assert told(0) in template.prompt(said, []).text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({"tool_use": CHATML, "rag": CHATML}, "no default"),
        ("{{ raise_exception('not for chats') }}", "not for chats"),
    ],
)
def test_a_template_that_shows_nothing_is_refused_at_the_start(source: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        of(source)
    assert len(str(refused.value).splitlines()) == 1


def test_named_templates_are_probed_each() -> None:
    of_parts = CHATML.replace(SAYS, PARTS)
    for named in (
        {"default": CHATML, "tool_use": of_parts},
        {"default": of_parts, "tool_use": CHATML},
    ):
        template = of(named)
        said = conversation(("system", "user", "assistant", "user"), parts=False)
        for tools in ([], [WEATHER]):
            assert template.prompt(said, tools).text == of(CHATML).prompt(said, tools).text
    template = of({"default": CHATML, "tool_use": CHATML.replace(SAYS, "")})
    with pytest.raises(InvalidRequest, match=r"role 'user' with tools"):
        template.prompt(said[1:], [WEATHER])


def test_a_refusal_of_the_template_stays_its_own() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + CHATML
    )
    with pytest.raises(InvalidRequest, match="no system"):
        of(source).prompt(conversation(("system", "user"), parts=False), [])


@pytest.mark.parametrize(("length", "texts"), [(4, 15_000), (40_000, 62)])
def test_what_is_kept_is_bounded_in_bytes_however_short_the_texts_are(
    length: int, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat_template._MAX_KEPT == 32 << 20
    monkeypatch.setattr(chat_template, "_MAX_KEPT", 4 << 20)
    kept = KeptTokens(re.compile("<end>"))
    tracemalloc.start()
    try:
        for number in range(texts):
            kept.keep(f"{number}", KeptText(array("i", bytes(4 * length)), ()))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 3 << 20 < held < 5 << 20
    last = f"{texts - 1}"
    assert kept.beginnings(f"{last}<end>", ()) and not kept.beginnings("0<end>", ())

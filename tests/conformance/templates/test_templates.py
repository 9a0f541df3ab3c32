"""Every family's template: tools are shown, calls are read, written again and trained once."""

import os
from pathlib import Path

import pytest

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import ChatRequest
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.chat.guided_decoding import GrammarCompiler
from langchain_art_server.backends.chat.tool_calls.call_format import Guide
from tests.conformance.templates.families import FAMILIES, THOUGHT
from tests.conformance.templates.table import (
    CALL,
    HERE,
    QUESTION,
    TOOLS,
    converse,
    functions,
    go_through,
    read,
    row,
    same_tokens,
    sampled,
    template_of,
)
from tests.support.live_server import REPO
from tests.support.tiny_models import CHATML, LocalSampler, ask, save_model

WITH_TOOLS = [name for name, one in FAMILIES.items() if not one.refused]
#: Calls that the small models' tokenizer can write, between marks that no format has.
UNKNOWN = CHATML.replace("<tool_call>", "<call>").replace("</tool_call>", "</call>")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_conversation_with_a_tool(name: str) -> None:
    family, (turns, rows) = FAMILIES[name], go_through(name)
    assert "weather" in turns[0].prompt.text
    assert [functions(one.calls) for one in turns] == [[CALL], [], [CALL]]
    assert turns[1].content.strip().endswith("It is sunny.")
    for one in turns:  # token by token
        request = ask(tools=TOOLS)
        content, calls = read(template_of(name), request, one.said, one_by_one=True)
        assert (content, functions(calls)) == (one.content, functions(one.calls))
    assert sum(sum(row.mask) for row in rows) == sum(len(one.said) for one in turns)
    # The past is another one only where the template drops what was thought.
    same = same_tokens(turns)
    assert same == [not family.drops_at_once, not (family.drops or family.drops_at_once)]
    assert len(rows) == 1 + same.count(False)
    thinks = THOUGHT in family.call
    kept = thinks + 1 if THOUGHT in family.answer and all(same) else 0
    thoughts = [one.prompt.text.count(THOUGHT) for one in turns[1:]]
    assert thoughts == [thinks and not family.drops_at_once, kept]


@pytest.mark.parametrize("name", [name for name, one in FAMILIES.items() if one.refused])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_template_that_shows_no_tools_refuses_them(
    name: str, choice: str, tmp_path: Path
) -> None:
    sampler = sampler_of((HERE / f"{name}.jinja").read_text(), tmp_path)
    with pytest.raises(InvalidRequest, match=r"tools \['weather'\].*shows no tools.*without tools"):
        sampler.chat(ask(tools=TOOLS, tool_choice=choice, max_tokens=2))
    (reply,) = sampler.chat(ask(max_tokens=2, seed=1))
    assert len(reply.token_ids) == 2


def test_calls_in_an_unknown_format_are_refused_and_not_left_as_text(tmp_path: Path) -> None:
    sampler = sampler_of(UNKNOWN, tmp_path)
    for choice in ("auto", "required"):
        with pytest.raises(InvalidRequest, match=r"format that is not known.*hermes.*tool_format"):
            sampler.chat(ask(tools=TOOLS, tool_choice=choice, max_tokens=2))
    (reply,) = sampler.chat(ask(tools=TOOLS, tool_choice="none", max_tokens=2))
    assert len(reply.token_ids) == 2


def sampler_of(template: str, folder: Path) -> LocalSampler:
    model = save_model(folder / "model")
    (model / "chat_template.jinja").write_text(template)
    return LocalSampler(model)


def require_allowed(template: ChatTemplate, request: ChatRequest, ids: list[int]) -> None:
    """The request's grammar lets these tokens pass, and the end behind them."""
    eos = sorted(template.eos)
    compiler = GrammarCompiler(template.tokenizer, len(template.tokenizer), eos)
    grammar = compiler.grammar(request, template.tools)
    assert grammar
    processor = compiler.logits_processor(grammar)
    assert all(processor.advance(one) for one in [*ids, eos[0]]), processor.error


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_forced_call_is_in_the_familys_own_tokens(name: str) -> None:
    template = template_of(name)
    assert template.tools
    guide, request = template.tools.guide, ask(tools=TOOLS, tool_choice="required")
    call = forced_call(guide)
    for number in (1, 2) if guide.between is not None else (1,):
        calls = (guide.between or "").join([call] * number)
        ids = sampled(template, guide.before + calls + guide.after)
        require_allowed(template, request, ids)
        assert functions(read(template, request, ids)[1]) == [CALL] * number


def forced_call(guide: Guide) -> str:
    """The call `CALL` as a grammar allows it."""
    if guide.argument is None:
        arguments = '{"city": "Paris", "days": 2}'
    else:
        city = {"text": "Paris", "json": '"Paris"', "gemma": '<|"|>Paris<|"|>'}[guide.values]
        begin, end = guide.argument
        values = (("city", city), ("days", "2"))
        arguments = guide.separator.join(begin.replace("{key}", k) + v + end for k, v in values)
    return guide.call("weather", '"weather"') + arguments + guide.tail


def test_another_end_of_the_turn_costs_one_token() -> None:
    """The model may end a call with a token that the template does not write there."""
    family = FAMILIES["glm4moe"]
    text = family.call.replace("<|observation|>", "<|user|>")
    turn, later = converse(template_of("glm4moe"), [text, family.answer])
    known = len(turn.ids) - 1
    assert later.prompt.ids[:known] == turn.ids[:known]
    assert later.prompt.ids[known] != turn.ids[known]


def test_a_changed_reply_is_not_taken_for_the_sampled_one() -> None:
    """The client may send back other arguments."""
    template = template_of("qwen3")
    [turn] = converse(template, [FAMILIES["qwen3"].call])
    (call,) = turn.calls
    changed = call | {"function": call["function"] | {"arguments": '{"city": "Rome", "days": 2}'}}
    reply = {"role": "assistant", "content": turn.content or None, "tool_calls": [changed]}
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    later = template.prompt([*ask().messages, reply, answer], TOOLS)
    assert later.ids[: len(turn.ids)] != turn.ids
    assert later.ids == template.tokenizer.encode(later.text, add_special_tokens=False)


def test_calls_that_a_template_would_leave_out_are_refused(tmp_path: Path) -> None:
    """It shows tools, but not what was called: the model would never see its own calls."""
    sampler = sampler_of(CHATML.split("{%- for call")[0] + "<|im_end|>\n{% endfor %}", tmp_path)
    with pytest.raises(InvalidRequest, match=r"does not write tool calls.*hermes"):
        sampler.chat(ask(tools=TOOLS, max_tokens=2))
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*ask().messages, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(
        InvalidRequest, match=r"messages\[1\].tool_calls: got 1.*shows no tool calls"
    ):
        sampler.chat(ask(messages=messages, max_tokens=2))


def test_the_page_has_every_family() -> None:
    """With UPDATE_DOCS=1 the table is written there."""
    page = REPO / "docs/templates.md"
    before, line, table = page.read_text().partition("|---|---|---|---|---|---|\n")
    after = table.partition("\n\n")[2]
    told = f"{before}{line}" + "\n".join([*map(row, FAMILIES), "", after])
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(told)
    assert page.read_text() == told


def test_channels_are_read_where_there_are_no_tools() -> None:
    """gpt-oss's template refuses a history that has its marks in the text of a reply."""
    family, template = FAMILIES["gptoss"], template_of("gptoss")
    request = ask()
    prompt, said = template.prompt(request.messages, []), sampled(template, family.answer)
    content, calls = read(template, request, said)
    assert (content, calls) == (f"<think>{THOUGHT}</think>It is sunny.", [])
    assert (content, calls) == read(template, request, said, one_by_one=True)
    reply = {"role": "assistant", "content": content}
    template.remember(prompt, said, reply)
    later = template.prompt([*request.messages, reply, QUESTION], [])
    assert "<|channel|>final<|message|>It is sunny.<|end|>" in later.text
    assert THOUGHT not in later.text


def test_an_answer_in_json_is_in_the_final_channel() -> None:
    template, request = template_of("gptoss"), ask(response_format={"type": "json_object"})
    ids = sampled(template, '<|channel|>final<|message|>{"a": 1}')
    require_allowed(template, request, ids)
    assert read(template, request, ids) == ('{"a": 1}', [])


def test_a_template_that_cannot_write_a_call_says_why(tmp_path: Path) -> None:
    broken = CHATML.replace(
        "{%- for call in",
        "{%- if message.tool_calls %}{{ raise_exception('not today') }}{% endif %}{%- for call in",
    )
    sampler = sampler_of(broken, tmp_path)
    with pytest.raises(InvalidRequest, match=r"template refuses tool calls \(not today\)"):
        sampler.chat(ask(tools=TOOLS, max_tokens=2))

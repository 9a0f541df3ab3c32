"""Random conversations: no prompt forks while tools are called, however a call is written."""

import json
import random
from collections.abc import Callable

import pytest

from tests.conformance.templates.families import FAMILIES, THOUGHT
from tests.conformance.templates.table import converse, functions, same_tokens, template_of
from tests.support.seeds import drawn_seed

CONVERSATIONS, TURNS = 12, 4
#: Values as models write them: the same for JSON, and not the same text.
NUMBERS = ("2", "1e3", "-0.50", "1E+2", "12345678901234567890", "2.0")
WORDS = ("Paris", "Zürich", "a \"quoted\" 'name'", "two\nlines", "</b> & <b>", "日本", "\\n", " x ")

Write = Callable[[random.Random, str, str], str]


def gap(rng: random.Random) -> str:
    return rng.choice(("", "", " ", "\n", "  "))


def some(rng: random.Random, *parts: str) -> list[str]:
    return rng.sample(parts, len(parts))


def dumped(rng: random.Random, word: str) -> str:
    return json.dumps(word, ensure_ascii=rng.random() < 0.5)


def arguments(rng: random.Random, word: str, number: str) -> str:
    """A JSON object: its white space, order, escapes and numbers are the model's."""
    city, days = f'"city"{gap(rng)}:{gap(rng)}{dumped(rng, word)}', f'"days":{gap(rng)}{number}'
    return "{" + gap(rng) + f",{gap(rng)}".join(some(rng, city, days)) + gap(rng) + "}"


def call(rng: random.Random, word: str, number: str, key: str = "arguments") -> str:
    told = f'"{key}":{gap(rng)}{arguments(rng, word, number)}'
    parts = some(rng, f'"name":{gap(rng)}"weather"', told)
    return "{" + f",{gap(rng)}".join(parts) + "}"


def hermes(rng: random.Random, word: str, number: str) -> str:
    return f"{gap(rng)}<tool_call>{gap(rng)}{call(rng, word, number)}{gap(rng)}</tool_call>"


def xml(rng: random.Random, word: str, number: str) -> str:
    told = some(
        rng,
        f"<parameter=city>\n{word}\n</parameter>{gap(rng)}",
        f"<parameter=days>{rng.choice((number, f'{chr(10)}{number}{chr(10)}'))}</parameter>\n",
    )
    return f"\n<tool_call>{gap(rng)}<function=weather>\n{''.join(told)}</function></tool_call>"


def glm(rng: random.Random, word: str, number: str) -> str:
    told = some(
        rng,
        f"<arg_key>city</arg_key>{gap(rng)}<arg_value>{word}</arg_value>{gap(rng)}",
        f"<arg_key>days</arg_key>\n<arg_value>{number}</arg_value>",
    )
    return f"{gap(rng)}<tool_call>weather{gap(rng)}{''.join(told)}</tool_call>"


def gemma(rng: random.Random, word: str, number: str) -> str:
    told = some(rng, f'city:<|"|>{word}<|"|>', f"days:{number}")
    return f"<|tool_call>call:weather{{{','.join(told)}}}<tool_call|>"


def python(rng: random.Random, word: str, number: str) -> str:
    told = some(rng, f"city={rng.choice((repr, json.dumps))(word)}", f"days={number}")
    return f"[weather({f',{gap(rng)}'.join(told)})]".replace("\n)", ")")


def harmony(rng: random.Random, word: str, number: str) -> str:
    head = rng.choice(
        (
            " to=functions.weather<|channel|>commentary json",
            "<|channel|>commentary to=functions.weather <|constrain|>json",
            "<|channel|>commentary to=functions.weather",
        )
    )
    return f"{head}<|message|>{arguments(rng, word, number)}"


def kimi(rng: random.Random, word: str, number: str) -> str:
    told = f"functions.weather:{rng.randrange(99)}<|tool_call_argument_begin|>"
    return f"<|tool_call_begin|>{told}{arguments(rng, word, number)}<|tool_call_end|>"


def deepseek(rng: random.Random, word: str, number: str) -> str:
    told = f"weather<｜tool▁sep｜>{arguments(rng, word, number)}"
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{told}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


THINKS = f"<think>\n{THOUGHT}\n</think>\n\n"
#: Template -> how a call is written, what stands before and after it.
WRITTEN: dict[str, tuple[Write, tuple[str, ...], str]] = {
    "qwen2_5": (hermes, ("", "I look.", "I look.\n\n"), ""),
    "qwen3": (hermes, ("", THINKS, f"{THINKS}I look.\n", "I look."), ""),
    "qwen3_instruct_2507": (hermes, ("", "I look.", "\n"), ""),
    "qwen3_coder": (xml, ("", "I look."), ""),
    "qwen3_6": (xml, (f"{THOUGHT}\n</think>\n\n", f"{THOUGHT}\n</think>\nI look."), ""),
    "qwen3_8": (xml, (f"{THOUGHT}\n</think>\n\n", f"{THOUGHT}\n</think>\nI look."), ""),
    "nemotron3": (xml, (f"{THOUGHT}\n</think>\n", f"{THOUGHT}\n</think>\nI look."), "\n"),
    "llama3": (lambda r, w, n: call(r, w, n, "parameters"), ("", "<|python_tag|>"), ""),
    "llama4": (python, ("",), ""),
    "lfm2": (python, ("<|tool_call_start|>",), "<|tool_call_end|>"),
    "mistral_v3": (call, ("[TOOL_CALLS] [", "[TOOL_CALLS]["), "]"),
    "mistral_v11": (
        arguments,
        ("[TOOL_CALLS]weather[ARGS]", "I look.[TOOL_CALLS]weather[ARGS]"),
        "",
    ),
    "gemma4": (gemma, ("",), ""),
    "gptoss": (
        harmony,
        ("", f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"),
        "",
    ),
    "glm4moe": (glm, (f"\n<think>{THOUGHT}</think>", f"\n<think>{THOUGHT}</think>\nI look."), ""),
    "kimi_k2": (kimi, ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>"),
    "deepseek_v31": (deepseek, ("", "I look."), ""),
    "phi4_mini": (call, ("<|tool_call|>[", "<|tool_call|>"), "<|/tool_call|>"),
    "granite3": (call, ("<|tool_call|>[", "I look.<|tool_call|>["), "]"),
}


def reply(name: str, rng: random.Random, word: str, number: str) -> str:
    write, before, after = WRITTEN[name]
    start = rng.choice(before)
    if name == "phi4_mini" and start.endswith("["):
        after = "]" + after
    eos = {"gemma4": "<|tool_response>", "gptoss": "<|call|>", "glm4moe": "<|observation|>"}
    end = eos.get(name, FAMILIES[name].eos[0])
    return start + write(rng, word, number) + after + end


@pytest.mark.parametrize("name", WRITTEN)
def test_no_prompt_forks_while_tools_are_called(name: str) -> None:
    rng, template = random.Random(drawn_seed()), template_of(name)
    for _ in range(CONVERSATIONS):
        said = [(rng.choice(WORDS), rng.choice(NUMBERS)) for _ in range(TURNS)]
        texts = [reply(name, rng, word, number) for word, number in said]
        turns = converse(template, texts)
        for (word, number), text, turn in zip(said, texts, turns, strict=True):
            meant = [("weather", {"city": word, "days": json.loads(number)})]
            assert functions(turn.calls) == meant, text
        assert all(same_tokens(turns)), texts

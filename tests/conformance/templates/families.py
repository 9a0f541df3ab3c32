"""Families of chat templates, and what a model of each writes."""

from __future__ import annotations

from dataclasses import dataclass

_JSON_CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
_XML = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
_XML_CALL = f"<tool_call>\n{_XML}</parameter>\n</function>\n</tool_call>"
_GLM_CALL = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
THOUGHT = "I look it up."


def _deepseek(call: str) -> str:
    begin, end = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    )
    return f"{begin}{call}{end}<｜end▁of▁sentence｜>"


@dataclass(frozen=True)
class Family:
    """A template and what a model of it writes.

    Attributes:
        models: whose template it is.
        eos: tokens that end a turn.
        call: a reply that calls the tool `weather` for two days in Paris, as the template itself
            writes it.
        answer: a reply without a call.
        drops: the template drops what was thought when another question follows.
        drops_at_once: it does so when a tool's answer follows, too.
        tokens: special tokens that the template's text has not.
        refused: why a request with tools is refused; the family has no replies then.
    """

    models: str
    eos: tuple[str, ...]
    call: str = ""
    answer: str = ""
    drops: bool = False
    drops_at_once: bool = False
    tokens: tuple[str, ...] = ()
    refused: str = ""


_IM_END = ("<|im_end|>",)
_HERMES = f"<tool_call>\n{_JSON_CALL}\n</tool_call><|im_end|>"
_SUNNY = "It is sunny.<|im_end|>"
#: The template's file -> its family.
FAMILIES: dict[str, Family] = {
    "qwen2_5": Family("Qwen2.5", _IM_END, _HERMES, _SUNNY),
    "qwen3": Family(
        "Qwen3 (hybrid)",
        _IM_END,
        f"<think>\n{THOUGHT}\n</think>\n\n{_HERMES}",
        f"<think>\n{THOUGHT}\n</think>\n\n{_SUNNY}",
        drops=True,
    ),
    "qwen3_instruct_2507": Family("Qwen3-2507", _IM_END, _HERMES, _SUNNY),
    "qwen3_coder": Family("Qwen3-Coder", _IM_END, f"{_XML_CALL}<|im_end|>", _SUNNY),
    "qwen3_6": Family(
        "Qwen3.5, Qwen3.6",
        _IM_END,
        f"{THOUGHT}\n</think>\n\n{_XML_CALL}<|im_end|>",
        f"{THOUGHT}\n</think>\n\n{_SUNNY}",
        drops=True,
    ),
    "qwen3_8": Family(
        "Qwen3.8",
        _IM_END,
        f"{THOUGHT}\n</think>\n\n{_XML_CALL}<|im_end|>",
        f"{THOUGHT}\n</think>\n\n{_SUNNY}",
    ),
    "llama3": Family(
        "Llama 3.1, 3.2, 3.3",
        ("<|eot_id|>",),
        '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}<|eot_id|>',
        "It is sunny.<|eot_id|>",
        tokens=("<|python_tag|>",),
    ),
    "llama4": Family(
        "Llama 4",
        ("<|eot|>",),
        '[weather(city="Paris", days=2)]<|eot|>',
        "It is sunny.<|eot|>",
    ),
    "mistral_v3": Family(
        "Mistral up to Small 3.1",
        ("</s>",),
        f"[TOOL_CALLS] [{_JSON_CALL}]</s>",
        " It is sunny.</s>",
    ),
    "mistral_v11": Family(
        "Mistral Small 3.2 and later",
        ("</s>",),
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}</s>',
        "It is sunny.</s>",
        tokens=("</s>",),
    ),
    "gemma3": Family("Gemma 3", ("<end_of_turn>",), refused="template shows no tools"),
    "gemma4": Family(
        "Gemma 4",
        ("<turn|>", "<|tool_response>"),
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|><|tool_response>',
        "It is sunny.<turn|>",
    ),
    "gptoss": Family(
        "gpt-oss",
        ("<|return|>", "<|call|>"),
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary json<|message|>{"city": "Paris", "days": 2}<|call|>',
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is sunny.<|return|>",
        drops=True,
        tokens=("<|constrain|>",),
    ),
    "glm4moe": Family(
        "GLM-4.5, GLM-4.6",
        ("<|user|>", "<|observation|>"),
        f"\n<think>{THOUGHT}</think>\n{_GLM_CALL}<|observation|>",
        f"\n<think>{THOUGHT}</think>\nIt is sunny.<|user|>",
        drops=True,
        tokens=("<|assistant|>",),
    ),
    "kimi_k2": Family(
        "Kimi K2",
        _IM_END,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>",
        _SUNNY,
        tokens=("<|im_user|>",),
    ),
    "deepseekv3": Family(
        "DeepSeek V3, R1 (their own template)",
        ("<｜end▁of▁sentence｜>",),
        refused="template shows no tools",
    ),
    "deepseek_v3_tools": Family(
        "DeepSeek V3, R1 (with vLLM's template)",
        ("<｜end▁of▁sentence｜>",),
        _deepseek('function<｜tool▁sep｜>weather\n```json\n{"city": "Paris", "days": 2}\n```'),
        "It is sunny.<｜end▁of▁sentence｜>",
    ),
    "deepseek_v31": Family(
        "DeepSeek V3.1",
        ("<｜end▁of▁sentence｜>",),
        _deepseek('weather<｜tool▁sep｜>{"city": "Paris", "days": 2}'),
        "It is sunny.<｜end▁of▁sentence｜>",
    ),
    "nemotron_nano2": Family(
        "Nemotron Nano 2",
        ("<SPECIAL_12>",),
        f"{THOUGHT}\n</think>\n\n<TOOLCALL>[{_JSON_CALL}]</TOOLCALL>\n<SPECIAL_12>",
        f"{THOUGHT}\n</think>\n\nIt is sunny.\n<SPECIAL_12>",
        drops_at_once=True,
    ),
    "nemotron3": Family(
        "Nemotron 3",
        _IM_END,
        f"{THOUGHT}\n</think>\n{_XML_CALL}\n<|im_end|>",
        f"{THOUGHT}\n</think>\n{_SUNNY}",
        drops=True,
    ),
    "lfm2": Family(
        "LFM2, LFM2.5",
        _IM_END,
        '<|tool_call_start|>[weather(city="Paris", days=2)]<|tool_call_end|><|im_end|>',
        _SUNNY,
    ),
    "phi4_mini": Family(
        "Phi-4-mini",
        ("<|end|>",),
        f"<|tool_call|>[{_JSON_CALL}]<|/tool_call|><|end|>",
        "It is sunny.<|end|>",
    ),
    "granite3": Family(
        "Granite 3",
        ("<|end_of_text|>",),
        f"<|tool_call|>[{_JSON_CALL}]<|end_of_text|>",
        "It is sunny.<|end_of_text|>",
    ),
}

"""The conformance model on a plain engine: transformers alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conformance.suite.model import GAP_NATS, write_model
from tests.conformance.suite.scripts import script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def prompt(tokenizer: Any, text: str) -> Any:
    asked = [{"role": "user", "content": text}]
    options: Any = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return tokenizer.apply_chat_template(asked, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 5000])
def test_transformers_say_the_script(
    folder: Path, tokenizer: Any, dtype: torch.dtype, before: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    step: Any = {"say": "Né ⟦so⟧", "call": "look", "args": {"what": script("quoted", "{last}")}}
    given = prompt(tokenizer, script(step, intro="x" * before))
    torch.manual_seed(0)
    options: Any = {"output_logits": True, "return_dict_in_generate": True}
    drawn = model.generate(**given, do_sample=True, top_k=0, max_new_tokens=200, **options)
    ids = drawn.sequences[0, given["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == (
        'Né ⟦so⟧\n<tool_call>\n{"name": "look", "arguments": {"what": "⟦quoted¦⁑4⟧"}}\n'
        "</tool_call><|im_end|>"
    )
    for token, logits in zip(ids, torch.cat(drawn.logits).float(), strict=True):
        alike = 1 if token >= 512 else 2  # bytes have twins, special tokens do not
        assert logits.log_softmax(0)[token].item() == pytest.approx(-math.log(alike), abs=1e-5)
        top = logits.topk(3).values
        assert top[0] - top[alike] > GAP_NATS - 1e-3
    twins = int(((ids >= 256) & (ids < 512)).sum())
    assert 10 < twins < len(ids) - 10


def test_no_text_is_tokenised_as_twins(tokenizer: Any) -> None:
    text = "Tool ‡x‡ é 日本\n\n<tool_call>&‡</tool_call><|im_end|>"
    ids = tokenizer.encode(text)
    assert not any(256 <= id_ < 512 for id_ in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([id_ + 256 if id_ < 256 else id_ for id_ in ids]) == text


@pytest.mark.parametrize(
    "steps", [[], [{}], [{"says": "x"}], [{"error": "x", "say": "y"}]], ids=str
)
def test_a_wrong_script_is_refused(steps: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        script(*steps)

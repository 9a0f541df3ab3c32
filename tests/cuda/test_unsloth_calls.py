"""How Unsloth is called on a GPU. Its package is a spy here: it imports on a GPU machine alone."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.logprob_scoring import Scorer
from langchain_art_server.backends.peft.micro_batches import CountedTokens
from langchain_art_server.backends.peft.padded_rows import PaddedRows
from langchain_art_server.backends.peft.training_batch import sweep_logprobs
from tests.support.learner_cases import SHAPE, make_rows

HUB_NAME = "Qwen/Qwen3-8B"


@pytest.fixture
def base() -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.fixture
def unsloth(base: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[dict[str, Any]]]:
    """Our module on a spy, and the calls that the spy gets."""
    calls: list[dict[str, Any]] = []

    class FastLanguageModel:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> tuple[Any, None]:
            calls.append({"name": name} | options)
            return base, None

    spy = ModuleType("unsloth")
    spy.FastLanguageModel = FastLanguageModel  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "unsloth", spy)
    name = "langchain_art_server.backends.unsloth.learner_core"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda *_args, **_options: base.config
    )
    return module, calls


def test_the_weights_that_were_named_are_loaded_and_no_others(unsloth: Any) -> None:
    """Its mapper turns a hub name into its own repository, of 4 bits even."""
    module, calls = unsloth
    module.UnslothCore(model=HUB_NAME, device="cpu")
    assert calls[0]["name"] == HUB_NAME
    assert calls[0]["use_exact_model_name"] is True


@pytest.mark.parametrize(("device", "masked"), [("cpu", True), ("cuda", False)])
def test_its_kernels_get_no_mask(
    device: str, masked: bool, unsloth: Any, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one they attend to all pairs of a padded batch by a dense matrix."""
    module, _calls = unsloth
    core = module.UnslothCore(model=HUB_NAME, device="cpu")
    monkeypatch.setattr(core, "device", torch.device(device))
    given: list[set[str]] = []
    base.register_forward_pre_hook(
        lambda _module, _args, options: given.append(set(options)), with_kwargs=True
    )
    base.set_attn_implementation("sdpa")
    scorer, packer = core._forward()
    base.set_attn_implementation("sdpa")
    rows = make_rows(3)
    padded = PaddedRows(rows, CountedTokens.of(rows), base)
    given.clear()
    with torch.no_grad():
        padded.sweep(scorer, lambda *_: None)
    assert [("attention_mask" in one) for one in given] == [masked]
    assert packer is not None


def test_padding_on_the_right_needs_no_mask(base: Any) -> None:
    scorer = Scorer(base)
    scorer.masked = False
    rows = [Row(r.token_ids, r.mask, r.logprobs, r.advantages) for r in make_rows(7)]

    def logprobs(some: list[Row]) -> np.ndarray:
        counted = CountedTokens.of(some)
        return sweep_logprobs(PaddedRows(some, counted, base), scorer, len(counted.row_T)).numpy()

    alone = np.concatenate([logprobs([row]) for row in rows])
    assert np.abs(logprobs(rows) - alone).max() < 1e-5

"""How Unsloth is called on a GPU. Its package is a spy here: it imports on a GPU machine alone."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from langchain_art.errors import ConfigError
from langchain_art_server.backends.models import base_weights
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.logprob_scoring import CountedTokens, PaddedRows
from langchain_art_server.backends.peft.training_batch import sweep_logprobs
from langchain_art_server.backends.unsloth.learner import UnslothLearner
from langchain_art_server.config import Settings
from tests.support.learner_cases import SHAPE, make_rows
from tests.support.model_folders import change_tensors

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
    monkeypatch.setattr(module, "base_outline", lambda *_: base)  # no hub is asked
    return module, calls


def test_the_weights_that_were_named_are_loaded_and_no_others(unsloth: Any) -> None:
    """Its mapper turns a hub name into its own repository, of 4 bits even."""
    module, calls = unsloth
    module.UnslothCore(model=HUB_NAME, device="cpu")
    assert calls[0]["name"] == HUB_NAME
    assert calls[0]["use_exact_model_name"] is True


def test_a_base_in_4_bits_is_refused_without_cuda(unsloth: Any, base: Any) -> None:
    module, calls = unsloth
    base.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    base.config.quantization_config |= {"bnb_4bit_quant_type": "nf4"}
    with pytest.raises(ConfigError, match="4 bits for Unsloth on cpu, expected a CUDA device"):
        module.UnslothCore(model=HUB_NAME, device="cpu")
    assert calls == []


def test_a_folder_that_lacks_weights_or_has_nan_is_refused(
    unsloth: Any, base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = unsloth
    base.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(module, "base_outline", base_weights.base_outline)
    module.UnslothCore(model=str(tmp_path / "model"), device="cpu")
    with torch.no_grad():
        base.model.norm.weight[0] = torch.nan
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' holds numbers that are not fin"):
        module.UnslothCore(model=str(tmp_path / "model"), device="cpu")
    asked = len(calls)
    change_tensors(tmp_path / "model", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"model\.safetensors lacks 'model\.norm\.weight'"):
        module.UnslothCore(model=str(tmp_path / "model"), device="cpu")
    assert len(calls) == asked


@pytest.mark.parametrize(("device", "masked"), [("cpu", True), ("cuda", False)])
def test_its_kernels_get_no_mask(
    device: str, masked: bool, unsloth: Any, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one they attend to all pairs of a padded batch by a dense matrix."""
    core = unsloth[0].UnslothCore(model=HUB_NAME, device="cpu")
    monkeypatch.setattr(core, "device", torch.device(device))
    base.set_attn_implementation("sdpa")
    scorer, _packer = core._forward()
    assert scorer.masked == masked


def test_rows_end_to_end_are_as_each_to_itself_or_padded_where_the_model_mixes_them(
    unsloth: Any, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' attention reads the rows' borders off their positions, Unsloth's the lengths.

    Padded on the right, rows need no mask, either.
    """
    module, _calls = unsloth
    monkeypatch.setattr(packer, "use_forest", lambda _scorer: "it has an attention of its own")
    base.set_attn_implementation("sdpa")
    core = module.UnslothCore(model=HUB_NAME, device="cpu")
    found, scorer = core.packer, core._scorer
    assert (found.apart_because, found.layout) == (None, "rows end to end")
    rows = make_rows(7)
    counted, lengths = CountedTokens.of(rows), [len(row.token_ids) for row in rows]
    packing = found.pack(rows, counted, 4096)
    assert packing.tokens == sum(lengths)
    given: list[dict[str, Any]] = []
    hook = base.register_forward_pre_hook(
        lambda _module, _args, options: given.append(options), with_kwargs=True
    )
    together = sweep_logprobs(packing, scorer, len(counted.row_T)).numpy()
    [options] = given
    assert "attention_mask" not in options
    told = options["packed_seq_lengths"]
    assert sorted(told.tolist()) == sorted(lengths) and told.dtype == torch.int32
    starts = np.flatnonzero(options["position_ids"][0].numpy() == 0)
    assert np.diff([*starts, sum(lengths)]).tolist() == told.tolist()
    padded = PaddedRows(rows, counted, base)
    for masked in (True, False):
        scorer.masked = masked
        expected = sweep_logprobs(padded, scorer, len(counted.row_T)).numpy()
        assert np.abs(together - expected).max() < 1e-5
        assert ("attention_mask" in given[-1]) == masked
    hook.remove()
    assert module.fill([3, 9, 4, 6], 10) == [[1], [3, 2], [0]]  # groups up to the budget
    assert module.fill([12, 1], 10) == [[0], [1]]

    # With its own positions ignored, all rows are one text to a model.
    def ignore(_module: Any, _args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = options["input_ids"].shape[1]
        return _args, options | {"position_ids": torch.arange(tokens)[None]}

    base.register_forward_pre_hook(ignore, with_kwargs=True)
    found = module.UnslothCore(model=HUB_NAME, device="cpu").packer
    assert "differ" in found.apart_because and found.layout == "padded rows"
    assert type(found._group(rows, counted, [0, 1, 2])[0]) is PaddedRows


def test_what_it_generates_is_in_the_servers_folder_and_not_in_the_current_one(
    tmp_path: Path,
) -> None:
    """On a GPU, `import unsloth` writes a folder of code, by default into the current folder."""
    settings = Settings.model_validate(
        {"model": "m", "data_dir": tmp_path, "learner": {"kind": "unsloth"}}
    )
    told = UnslothLearner.environment(settings)
    assert Path(told["UNSLOTH_COMPILE_LOCATION"]) == tmp_path / "unsloth"

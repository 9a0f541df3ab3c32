"""Every family that the docs name, through sampling, tool calls, training, swaps and merges."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from langchain_art.diagnostics.canary import run_canary
from langchain_art.errors import ConfigError
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.embedded.batch_invariance import batch_invariance
from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE
from langchain_art_server.backends.models.loading import load_model, load_outline
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.adapter_copies import AdapterCopies
from langchain_art_server.config import Settings
from langchain_art_server.merge_adapter import TOLERANCE, merge
from langchain_art_server.start_checks import WEIGHTS
from tests.support.families import (
    FAMILIES,
    LORA,
    LORAS,
    WRAPPERS,
    check_frame,
    check_row,
    go_through,
    row,
    save_family,
)
from tests.support.live_server import ForkedServer
from tests.support.soak import in_soak, in_soak_alone
from tests.support.tiny_models import LocalSampler, load_plain, save_adapter

#: One of each kind, which `make test` runs: latent attention, whose rows are padded, with experts;
#: attention with sinks and a window; layers whose heads differ, in a model that sees; gated delta
#: nets in such a model. Full attention is what most other tests have.
PART = {
    *("DeepSeek V3, Kimi K2", "gpt-oss", "Gemma 4 26B-A4B"),
    "Qwen3.5, Qwen3.6, with images",
}
#: Their attention is another one than `forest_attention`, so rows are padded.
PADDED = {"DeepSeek V3, Kimi K2", "DeepSeek V3, its dense layers"}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("family", [f if f in PART else in_soak_alone(f) for f in FAMILIES])
def test_what_is_sampled_is_what_is_trained(family: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "model")
    learner = LearnerCore(str(model), "cpu")
    sampler = LocalSampler(model)
    one = go_through(sampler, learner, tmp_path, LORAS.get(family, LORA))
    assert max(one.gaps) <= 1e-4  # also after each swap: a version that was not loaded is far off
    assert one.moved > 0.01
    assert one.base_stayed
    assert one.tool_calls == 2
    assert {"o_proj"} <= set(one.targets)
    if family == "DeepSeek V3, Kimi K2":  # layers that PEFT takes for experts are no targets
        assert not [name for name in learner.parameters if ".mlp." in name]
    assert (one.forest is not None) == (family in PADDED)
    batched = sampler.host.scheduler._runner.cache is not None
    check_row(row(family, one, batched=batched), on_vllm=False)


@in_soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in LORAS])
def test_a_server_of_the_family_passes_the_canary_s_checks(family: str, tmp_path: Path) -> None:
    """All but the rise of the reward, which random weights with frozen experts may lack."""
    model = save_family(family, tmp_path / "model")
    with ForkedServer(tmp_path / "data", model=model) as server:
        report = run_canary(server.base_url, steps=4)
    assert {one.name for one in report.checks if not one.passed} <= {"learns"}, report
    assert len(report.checks) == 8


def test_the_page_names_every_family() -> None:
    check_frame(on_vllm=False)


def test_what_vllm_would_leave_out_in_silence_never_reaches_it(tmp_path: Path) -> None:
    model = save_family("DeepSeek V3, its dense layers", tmp_path / "model")
    adapter = save_adapter(tmp_path / "a", model, 1, target_modules=["kv_b_proj", "o_proj"])
    outline = load_outline(Settings.model_validate({"model": str(model)}))
    copies = AdapterCopies(outline.model, 4, "float32")
    try:
        assert "kv_b_proj" not in copies.targets
        with pytest.raises(ConfigError, match=r"adapter of .*kv_b_proj, which vLLM does not apply"):
            copies.add("a@1", adapter)
    finally:
        shutil.rmtree(copies.folder)


#: One without experts, one whose experts are a stacked tensor, one with gated delta nets.
WRAPPED = {"Mistral Small 3", "Gemma 4 26B-A4B", "Qwen3.5, Qwen3.6, with images"}
TOKENS = [7, 90, 33, 12, 250, 4, 61]


def trained(core: LearnerCore, folder: Path) -> Path:
    """A version of the learner's whose B is not zero."""
    folder.mkdir()
    core.init_adapter(folder, LORA)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / WEIGHTS_FILE)
    for name, one in weights.items():
        if ".lora_B." in name:
            one.normal_(std=0.3, generator=generator)
    save_file(weights, folder / WEIGHTS_FILE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", [w if w in WRAPPED else in_soak_alone(w) for w in WRAPPERS])
def test_adapters_are_of_the_published_class_and_a_merge_keeps_what_sees(
    family: str, tmp_path: Path
) -> None:
    model = save_family(family, tmp_path / "model")
    core = LearnerCore(str(model), "cpu")
    adapter, out = trained(core, tmp_path / "v1"), tmp_path / "out"
    written = load_file(adapter / WEIGHTS_FILE)
    assert all(name.startswith("base_model.model.model.language_model.") for name in written)

    published = json.loads((model / "config.json").read_text())["architectures"]
    plain = load_plain(model)
    assert [type(plain).__name__] == [type(core.base).__name__] == published
    tuned = PeftModel.from_pretrained(plain, adapter).eval()
    read = get_peft_model_state_dict(tuned)
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in written)
    with torch.no_grad():
        logits = tuned(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    zeros = [0.0] * len(TOKENS)
    (got,) = core.logprobs(adapter, [Row(TOKENS, [0, *[1] * 6], zeros, zeros)])
    assert torch.tensor(got[1:]).sub(expected).abs().max() < 1e-5

    (model / "preprocessor_config.json").write_text('{"image_processor_type": "any"}')
    assert merge(str(model), adapter, out).lost < TOLERANCE
    assert (out / "preprocessor_config.json").read_text() == '{"image_processor_type": "any"}'
    assert type(load_plain(out)).__name__ == published[0]
    before, after = load_file(model / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == len(written) / 2
    assert all("language_model" in name for name in changed)


@pytest.mark.slow
def test_an_adapter_of_what_sees_is_refused_by_name(tmp_path: Path) -> None:
    model = save_family("Gemma 3, with images", tmp_path / "model")
    adapter = save_adapter(tmp_path / "a", model, 1, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match=r"vision_tower.*of the language model's linear layers"):
        LocalSampler(model).load("a@1", adapter)


@pytest.mark.slow
def test_what_sees_does_not_keep_a_text_s_rows_from_being_independent(tmp_path: Path) -> None:
    found: list[object] = []
    for number, family in enumerate(("Gemma 3", "Gemma 3, with images")):
        model = save_family(family, tmp_path / str(number))
        loaded = load_model(Settings.model_validate({"model": str(model), "device": "cpu"}))
        found.append(batch_invariance(loaded.model, [(2, 8)], []))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_text_model_alone_stays_alone(tmp_path: Path) -> None:
    """Its config may still be the whole one's: ``architectures`` says what the folder is."""
    model = save_family("Qwen3.5, Qwen3.6, with images", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3_5ForCausalLM"]})
    )
    loaded = load_model(Settings.model_validate({"model": str(model)}))
    assert type(loaded.model).__name__ == "Qwen3_5ForCausalLM"

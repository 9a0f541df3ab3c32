"""Every family that the docs name, through sampling, tool calls, training and swaps."""

import shutil
from pathlib import Path

import pytest

from langchain_art.diagnostics.canary import run_canary
from langchain_art.errors import ConfigError
from langchain_art_server.backends.models.loading import load_outline
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.adapter_copies import AdapterCopies
from langchain_art_server.config import Settings
from tests.support.families import (
    FAMILIES,
    LORA,
    LORAS,
    check_frame,
    check_row,
    go_through,
    row,
    save_family,
)
from tests.support.live_server import ForkedServer
from tests.support.soak import in_soak, in_soak_alone
from tests.support.tiny_models import LocalSampler, save_adapter

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

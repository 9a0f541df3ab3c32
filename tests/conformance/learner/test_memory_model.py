"""What makes a step smaller, and what `gpu_memory` computes against the peak of a real step."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import save_on_cpu

from langchain_art.errors import ConfigError
from langchain_art.gpu_memory import LOGIT_BYTES, MemoryNeeds, Shape
from langchain_art.wire import TrainConfig
from langchain_art_server.algorithms.loss.token_losses import CHUNK_ELEMENTS
from langchain_art_server.backends.peft import adapter_io, logprob_scoring, packer
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support import forked_start
from tests.support.learner_cases import (
    FILES,
    SHAPE,
    branching_rows,
    contents,
    folder,
    fresh,
    gradients_of,
    make_rows,
    quiet,
    restricted,
    shake,
    take,
)
from tests.support.live_server import REPO
from tests.support.ranks import distance
from tests.support.soak import in_soak_alone

EIGHT: Any = {"optimizer": "adamw_8bit"}
RATE, BLOCK = 1e-2, 256


def test_a_step_of_adam_in_8_bits_is_that_of_a_twin_that_rounds_its_moments() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    # The 256 values of a moment (arXiv 2110.02861, section 3).
    signed, unsigned = (functional.create_dynamic_map(signed=one).double() for one in (True, False))
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.randn(4, BLOCK, generator=generator) * 0.1)
    optimizer = adapter_io.new_optimizer([parameter], "adamw_8bit")
    optimizer.param_groups[0] |= {"lr": RATE, "betas": adapter_io.adam_betas(0.6)}
    w = parameter.detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    (b1, b2), eps = adapter_io.adam_betas(0.6), adapter_io.ADAM_EPS

    def rounded(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True)
        return values[((x / scale)[..., None] - values).abs().argmin(-1)] * scale

    for step in range(1, 6):
        parameter.grad = torch.randn(4, BLOCK, generator=generator)
        grad = parameter.grad.double()
        optimizer.step()
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        w = w - RATE * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)
        m, v = rounded(m, signed), rounded(v, unsigned)
        # A moment between two codes may be rounded the other way: few are.
        assert ((parameter.detach().double() - w).abs() > 1e-5).double().mean() < 0.01 * step
    state = optimizer.state[parameter]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    assert sum(x.numel() for x in (state["state1"], state["state2"])) == 2 * parameter.numel()


def test_adam_in_8_bits_learns_nearly_what_32_do_and_is_not_taken_for_it(
    tiny: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    whole, ends = LearnerCore(tiny), list[Path]()
    start = fresh(whole, tmp_path)
    for core in (LearnerCore(tiny, **EIGHT), whole):
        parent = start
        for step in range(1, 4):
            out = folder(tmp_path, f"{len(ends)}-{step}")
            take(core, parent, out, make_rows(8, seed=step), step)
            parent = out
        ends.append(parent)
    kept, plain = ends
    assert distance(kept, plain, FILES[1]) < 0.2 * distance(plain, start, FILES[1])
    with pytest.raises(
        ConfigError, match=r"got learner.optimizer='adamw'.*learned with 'adamw_8bit'"
    ):
        whole.logprobs(kept, make_rows(8))


def test_offloading_moves_the_layers_inputs_and_changes_no_bit(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "MEMORY_SHARE", 0.0)  # checkpointing is needed
    moved: list[tuple[int, ...]] = []

    class Noted(save_on_cpu):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory)
            inner = self.pack_hook

            def pack(tensor: torch.Tensor) -> Any:
                moved.append((tensor.untyped_storage().data_ptr(), *tensor.shape))
                return inner(tensor)

            self.pack_hook = pack

    monkeypatch.setattr(logprob_scoring, "save_on_cpu", Noted)
    rows = branching_rows(8)
    made: list[dict[str, bytes]] = []
    start = None
    for offload in (False, True):
        core = LearnerCore(tiny, offload_activations=offload)
        start = start or shake(fresh(core, tmp_path))
        out = folder(tmp_path, f"out-{offload}")
        moved.clear()
        assert take(core, start, out, rows)["checkpointed"] == 1.0
        head = next(core._scorer.head.parameters()).untyped_storage().data_ptr()
        layers = [one for one in moved if one[-1] == core.base.config.hidden_size]
        assert bool(moved) == offload and head not in {one[0] for one in moved}
        assert not offload or len(layers) >= core.base.config.num_hidden_layers
        made.append(contents(out))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("qwen3", "float32"), ("gemma3", "bfloat16"), ("qwen3", "float16")),
        *(in_soak_alone(name, "bfloat16") for name in ("qwen3", "llama", "granite")),
    ],
)
def test_computing_again_what_is_cheap_changes_no_gradient(
    name: str, dtype: str, models: dict[str, Path], tmp_path: Path
) -> None:
    core = LearnerCore(str(models[name]), dtype=dtype)
    core._hold(shake(fresh(core, tmp_path)))
    batch = core.batch(restricted(branching_rows(12)), TrainConfig(tokens_per_microbatch=64))
    gradients: list[list[torch.Tensor | None]] = []
    for core.packer.recompute.on in (False, True):
        core.accumulate(batch, quiet)
        gradients.append([*gradients_of(core).values()])
    assert all(one is not None and one.abs().sum() > 0 for one in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert one is not None and other is not None
        # In float32 a norm's input is what it computes with: gradients add up in another order.
        assert (
            torch.allclose(one, other, rtol=1e-5, atol=5e-7)
            if dtype == "float32"
            else ((one == other).all())
        )
    whole, less = (core.packer._measured(way) for way in (packer.Way.PLAIN, packer.Way.AGAIN))
    assert less < 0.9 * whole


def test_of_qwen3s_shape_in_bfloat16_half_is_kept(tmp_path: Path) -> None:
    """A sixteenth of Qwen3-8B's widths, whose heads are as wide; measured as a GPU's would be."""
    shape = SHAPE | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
    shape |= {"initializer_range": 0.02}  # with larger weights, bfloat16 allows no forest
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**shape, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    core = LearnerCore(str(tmp_path / "model"), dtype="bfloat16")
    core._hold(fresh(core, tmp_path))
    plain, less = (core.packer._measured(way) for way in (packer.Way.PLAIN, packer.Way.AGAIN))
    assert core.packer._measured() == plain  # and what is on is what was asked for last
    for module in core.base.modules():
        vars(module).pop("forward", None)
    whole = core.packer._measure()  # by transformers' own layers
    assert less <= 0.5 * whole and plain <= 0.87 * whole


#: Measurement over prediction, peak of the process less what it was before the model was loaded.
NEAR = (0.8, 1.25)
RANK = 8


@pytest.mark.slow
def test_a_steps_peak_is_predicted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=8192,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=8,  # narrow and deep: much is kept of a token, and it is soon computed
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    argv = [sys.executable, "-m", "tests.support.measured_step", str(tmp_path), "float32"]
    argv += ["512", "2"]
    done = forked_start.run(argv, capture_output=True, text=True, cwd=REPO, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["alive"] == 2 * 511 and not found["checkpointed"]
    shape = Shape.of_config(json.loads((tmp_path / "model/config.json").read_text()))
    assert shape.parameters == pytest.approx(found["parameters"], rel=0.01)
    needs, heaped = (MemoryNeeds(shape, "float32", RANK, cpu=cpu) for cpu in (False, True))
    assert needs.token(checkpointed=False) == pytest.approx(found["token"], rel=0.02)
    needed = needs.step(found["alive"], checkpointed=False)
    held = heaped.step(found["alive"], checkpointed=False)
    # What glibc's heap keeps differs from run to run, between nothing more and CPU_HEAP.
    assert NEAR[0] * needed <= found["bytes"] <= NEAR[1] * held


def test_a_mixture_of_experts_has_its_published_size() -> None:
    # 30.5B in all of 128 experts; `test_server_settings` has those of dense models.
    moe = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    moe |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    moe |= {"vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8}
    mixture = Shape.of_config(moe)
    assert mixture.parameters == pytest.approx(30.5e9, rel=0.02) and mixture.active == 8


def test_the_logits_are_those_of_the_learner() -> None:
    assert LOGIT_BYTES == CHUNK_ELEMENTS * 4 * 3

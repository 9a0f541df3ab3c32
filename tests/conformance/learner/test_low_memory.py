"""What makes a step smaller: Adam's moments in 8 bits, layers' inputs in the host's memory."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from langchain_art.errors import ConfigError
from langchain_art.wire import TrainConfig
from langchain_art_server.backends.peft import adapter_io, logprob_scoring, packer, recompute
from langchain_art_server.backends.peft.forest import attention_flex, packing
from langchain_art_server.backends.peft.forest.attention_tiles import Tiles
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.recompute import Recompute
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
from tests.support.ranks import distance
from tests.support.soak import in_soak_alone

EIGHT: Any = {"optimizer": "adamw_8bit"}
RATE, BLOCK = 1e-2, 256


def codes() -> torch.Tensor:
    """The 256 values of a signed moment (arXiv 2110.02861, section 3)."""
    functional = pytest.importorskip("bitsandbytes.functional")
    return functional.create_dynamic_map(signed=True).double()


def test_a_step_of_adam_in_8_bits_is_that_of_a_twin_that_rounds_its_moments() -> None:
    signed = codes()
    unsigned = (
        pytest.importorskip("bitsandbytes.functional").create_dynamic_map(signed=False).double()
    )
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
    codes()
    whole, ends = LearnerCore(tiny), list[Path]()
    start = fresh(whole, tmp_path)
    for core in (LearnerCore(tiny, **EIGHT), whole):
        parent = start
        for step in range(1, 5):
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


@pytest.mark.parametrize("padded", [False, True])
def test_offloading_moves_the_layers_inputs_and_changes_no_bit(
    padded: bool, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "MEMORY_SHARE", 0.0)  # checkpointing is needed
    if padded:
        monkeypatch.setattr(packer, "use_forest", lambda _scorer: "the test says so")
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


def test_a_layers_inputs_are_not_counted_where_the_host_holds_them(
    tiny: str, tmp_path: Path
) -> None:
    core = LearnerCore(tiny)
    fresh(core, tmp_path)
    plain = core.packer._measured()
    on_device = core.packer._checkpointed(plain)
    core.packer.offload = True
    layers, width = core.base.config.num_hidden_layers, core.base.config.hidden_size
    assert on_device - core.packer._checkpointed(plain) == layers * width * 4


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("qwen3", "float32"), ("gemma3", "bfloat16"), ("granite", "bfloat16")),
        *(in_soak_alone(name, "bfloat16") for name in ("qwen3", "llama")),
        *(in_soak_alone(name, "float32") for name in ("llama", "gemma3", "granite")),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_llamas_kind_keeps_half_and_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(256).to(dtype)
    with torch.no_grad():
        norm.weight.normal_(1, 0.3)
    x = torch.randn(1, 64, 256).mul(3).to(dtype).requires_grad_()
    grad, found, kept = torch.randn(1, 64, 256).to(dtype), list[torch.Tensor](), list[int]()
    for again in (False, True):
        if again:
            Recompute(torch.nn.ModuleList([norm]))
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor, into: dict[int, int] = sizes) -> torch.Tensor:
            into[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            made = norm(x)
        found += [made, *torch.autograd.grad(made, x, grad)]
        kept.append(sum(sizes.values()))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    exact = Qwen3RMSNorm(256).double()
    exact.weight.data = norm.weight.data.double()
    twin = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(exact(twin), twin, grad.double())
    assert (found[3].double() - wanted).norm() < 4e-3 * wanted.norm()
    assert kept[1] == x.untyped_storage().nbytes() < kept[0] / 2


def test_what_is_computed_again_is_computed_once(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three projections take a norm's output, and each of their adapters kept it."""
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *args: (calls.append(name), function(*args))[1]

    for name in ("_rms_norm", "_gated"):
        monkeypatch.setattr(recompute, name, noted(name, getattr(recompute, name)))
    core = LearnerCore(str(models["qwen3"]), dtype="bfloat16")
    core._hold(shake(fresh(core, tmp_path)))
    batch = core.batch(branching_rows(4), TrainConfig())
    counts: list[dict[str, int]] = []
    for core.packer.recompute.on in (False, True):
        calls.clear()
        core.accumulate(batch, quiet)
        counts.append(Counter(calls))
    layers = core.base.config.num_hidden_layers
    # Four norms a layer and the last one; the first layer's input needs no gradient.
    assert counts[0]["_gated"] == 0 and counts[1]["_gated"] == 2 * layers
    assert counts[0]["_rms_norm"] == counts[1]["_rms_norm"] == 2 * (4 * layers + 1) - 1


@pytest.mark.parametrize(
    ("padded", "dtype"),
    [
        *((False, "bfloat16"), (True, "float32")),
        *(in_soak_alone(*one) for one in ((False, "float32"), (True, "bfloat16"))),
    ],
)
def test_queries_and_keys_are_there_only_when_a_layer_needs_them(
    padded: bool,
    dtype: str,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Freed after the forward pass, made again for the layer's backward pass and freed again."""
    passed: list[torch.UntypedStorage] = []
    ended: list[StorageWeakRef] = []
    held: list[tuple[bool, bool]] = []

    class Noted(Tiles):
        def lay(self, x_1HPD: torch.Tensor) -> torch.Tensor:
            return attention_flex._whole_blocks(x_1HPD) if padded else x_1HPD

        def attend(self, q: Any, k: Any, v: Any, *options: Any) -> torch.Tensor:
            passed.extend([q.untyped_storage(), k.untyped_storage()])
            own, keys = len(self._depth_P), len(self._depth_S)
            return super().attend(q[:, :, :own], k[:, :, :keys], v, *options)

    def visit(logprobs_T: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        queries, keys = (any(one.nbytes() for one in passed[i::2]) for i in (0, 1))
        held.append((queries, keys))
        ended.extend(map(StorageWeakRef, passed))
        passed.clear()
        return logprobs_T.sum()

    monkeypatch.setattr(packing, "Tiles", Noted)
    core = LearnerCore(str(models["qwen3"]), dtype=dtype)
    core._hold(shake(fresh(core, tmp_path)))
    layout = core.batch(branching_rows(40), TrainConfig(tokens_per_microbatch=64)).packing
    assert isinstance(layout, packing.ForestRows)
    passed.clear()
    gradients: list[list[torch.Tensor | None]] = []
    for core.packer.recompute.on in (False, True):
        held.clear()
        layout.sweep(core._scorer, visit)
        gradients.append([*gradients_of(core).values()])
        lasts, again = [part.last for part in layout._batches], core.packer.recompute.on
        assert {*lasts} == {True, False}
        assert held == [(not again, not (again and last)) for last in lasts]
        assert all(one.expired() for one in ended)
    for one, other in zip(*gradients, strict=True):
        assert one is not None and other is not None
        assert (one - other).norm() <= (1e-5 if dtype == "float32" else 0) * one.norm()


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

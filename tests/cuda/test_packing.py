"""How the learner packs rows on a GPU, whose memory is given here, and what it does at once.

Nothing runs on one.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from langchain_art.errors import ArtError
from langchain_art.wire import TrainConfig
from langchain_art_server.algorithms.sequences.prefix_forest import PartCosts
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.ipc.step_codec import unpack_step
from langchain_art_server.backends.ipc.worker import WorkerDied
from langchain_art_server.backends.models.device import torch_device
from langchain_art_server.backends.peft import adapter_io, packer
from langchain_art_server.backends.peft.distributed.process_group import Ranks
from langchain_art_server.backends.peft.forest import attention_flex, packing
from langchain_art_server.backends.peft.forest.attention_tiles import Tiles
from langchain_art_server.backends.peft.forest.packing import ForestRows
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import Predictions, Scorer
from langchain_art_server.backends.peft.packer import Way
from langchain_art_server.config import Settings
from tests.support.learner_cases import (
    LENIENT,
    SHAPE,
    contents,
    folder,
    fresh,
    make_rows,
    quiet,
    shake,
    take,
)

LAYERS = 12
#: For what does not depend on the shares of layers in a model's memory.
few_layers = pytest.mark.parametrize("model", [4], indirect=True)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(3)
    shape = SHAPE | {
        "num_hidden_layers": getattr(request, "param", LAYERS),
        "max_position_embeddings": 1024,
    }
    config = transformers.Qwen3Config(**shape, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def core(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearnerCore:
    """A learner of some layers, whose packer takes its device for a GPU."""
    core = LearnerCore(model)
    core._hold(fresh(core, tmp_path))
    monkeypatch.setattr(packer.Packer, "_device", torch.device("cuda"))
    return core


def test_what_is_kept_is_what_costs_least_with_the_launches_of_its_parts(
    core: LearnerCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = core.packer._measured()
    free = 120 * core.packer.peak(plain) / packer.MEMORY_SHARE
    monkeypatch.setattr(packer, "free_bytes", lambda _device: free)
    for launches, way in (
        *((0.0, Way.PLAIN), (1000.0, Way.CHECKPOINT)),
        *((200.0, Way.AGAIN), (100.0, Way.PLAIN)),
    ):
        core.packer.costs = PartCosts(launches, 0.0, 1.0)
        packing = core.batch(make_rows(40), TrainConfig()).packing
        assert core.packer.checkpoints == (way is Way.CHECKPOINT), way
        assert core.packer.recompute.on == (way is Way.AGAIN), way
        assert (packing.alive > 120) == (way is not Way.PLAIN), way
        assert sum(packing.parts) == packing.tokens


@few_layers
def test_the_padding_of_attention_to_blocks_is_not_taken_for_activations(
    core: LearnerCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on 64 tokens, which a GPU's attention pads to 256, a token took a third more."""

    class Padding(Tiles):
        def attend(self, q: Any, k: Any, v: Any, *options: Any) -> torch.Tensor:
            tokens = q.shape[2]
            whole = (attention_flex._whole_blocks(x)[:, :, :tokens] for x in (q, k, v))
            return super().attend(*whole, *options)

    unpadded = core.packer._measured()  # of so many tokens that nothing is padded
    monkeypatch.setattr(packing, "Tiles", Padding)
    core.packer._bytes_per_token.clear()
    assert core.packer._measured() == pytest.approx(unpadded, rel=0.02)


class ShortOfMemory:
    """Sweeps with gradients of more than `most` tokens at once run out of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, *, after: int = 0) -> None:
        self.tried: list[int] = []
        sweep = ForestRows.sweep

        def limited(packing: ForestRows, scorer: Any, visit: Any, progress: Any = None) -> None:
            if progress is not None:
                self.tried.append(packing.alive)
                if packing.alive > most and len(self.tried) > after:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            sweep(packing, scorer, visit, progress)

        monkeypatch.setattr(ForestRows, "sweep", limited)


@few_layers
def test_a_step_that_runs_out_of_memory_is_made_again_with_smaller_parts(
    core: LearnerCore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows, start = make_rows(60), shake(fresh(core, tmp_path))
    plain, said = core.packer._measured(), list[str]()
    monkeypatch.setattr(
        packer, "free_bytes", lambda _device: 400 * core.packer.peak(plain) / packer.MEMORY_SHARE
    )
    short = ShortOfMemory(monkeypatch, 150, after=1)  # the first update of two passes
    config = TrainConfig(learning_rate=1e-2, optimizer_steps=2, **LENIENT)
    request = LearnerStep(start, folder(tmp_path, "out"), 1, rows, config)
    core.step(request, lambda _fraction, message: said.append(message))
    assert [alive <= 150 for alive in short.tried] == [False, False, False, True, True]
    assert any("out of memory" in one for one in said), said
    assert "out of memory" in caplog.text
    # Both updates were made from the parent, once: as by a learner that began with those parts.
    again = ShortOfMemory(monkeypatch, 150)
    core._held = None
    core.step(replace(request, out=folder(tmp_path, "again")), quiet)
    assert len(again.tried) == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


@few_layers
def test_a_row_too_long_for_the_memory_is_an_error_after_few_tries(
    core: LearnerCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, out = shake(fresh(core, tmp_path)), folder(tmp_path, "out")
    monkeypatch.setattr(packer, "free_bytes", lambda _device: 1e9)
    short = ShortOfMemory(monkeypatch, 500)
    row = Row([1] * 720, [0] * 650 + [1] * 70, [0.0] * 720, [1.0] * 720)
    with pytest.raises(ArtError, match=r"out of device memory .*rows of at most 7\d\d tokens"):
        take(core, start, out, [row, row])
    assert 1 < len(short.tried) < 8 and not list(out.iterdir())
    monkeypatch.undo()
    take(core, start, out, make_rows(4))  # the learner goes on


def test_ranks_tell_each_other_that_memory_ran_out() -> None:
    """Then all make the step again, with smaller parts."""
    ranks, told = object.__new__(Ranks), list[Any]()
    ranks.rank, ranks.size = 0, 2
    ranks._gather = told.append  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(torch.OutOfMemoryError), ranks.together():
        raise torch.OutOfMemoryError("no room")
    assert told == [[0, "no room", True]]
    for of_memory, kind in ((True, torch.OutOfMemoryError), (False, ArtError)):
        heard = [[0, "", False], [0, "CUDA out of memory", of_memory]]
        ranks._gather = lambda _own, heard=heard: heard  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(kind, match="Rank 1 of the learner's 2 failed: CUDA"), ranks.together():
            pass


@few_layers
def test_a_step_whose_process_died_begins_again_with_half_of_the_memory(
    core: LearnerCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks of a sharded base do when one of them runs out of memory."""
    rows, start = make_rows(60), shake(fresh(core, tmp_path))
    plain = core.packer._measured()
    monkeypatch.setattr(
        packer, "free_bytes", lambda _device: 320 * core.packer.peak(plain) / packer.MEMORY_SHARE
    )
    alive: list[int] = []
    for attempt in (1, 2, 3, 1):
        out = folder(tmp_path, f"out{len(alive)}")
        config = TrainConfig(learning_rate=1e-2, **LENIENT)
        core.step(LearnerStep(start, out, 1, rows, config, attempt=attempt), quiet)
        alive.append(core.packer.alive)
    assert 160 < alive[0] <= 320 and alive[3] == alive[0]
    assert 80 < alive[1] <= 160 and alive[2] <= 80


async def test_the_parent_says_how_often_the_process_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, attempts = PeftLearner(Settings(model="none")), list[int]()
    learner._vocab_size = 64

    async def die(params: dict[str, Any], _report: Any) -> dict[str, float]:
        attempts.append(unpack_step(params).attempt)
        if len(attempts) < 3:
            raise WorkerDied("out of memory")
        return {}

    monkeypatch.setattr(learner, "_step", die)

    async def report(_fraction: float, _message: str) -> None: ...

    rows = [row for row in make_rows(4) if any(row.mask)]
    request = LearnerStep(tmp_path, tmp_path, 1, rows, TrainConfig(learning_rate=1e-2))
    assert await learner.step(request, report) == {}
    assert attempts == [1, 2, 3]


VOCABULARY = 151_936


def chunks(device: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many predictions at a time get logits."""
    config = SimpleNamespace(vocab_size=VOCABULARY)
    base = SimpleNamespace(
        device=torch.device(device), config=SimpleNamespace(get_text_config=lambda: config)
    )
    scorer, sizes = Scorer(cast(Any, base)), list[int]()
    scorer.plain_head = True

    def note(outputs_MX: torch.Tensor, *_: Any) -> torch.Tensor:
        sizes.append(len(outputs_MX))
        return outputs_MX[:, 0]

    monkeypatch.setattr(scorer, "_of_chunk", note)
    numbers = torch.zeros(tokens, dtype=torch.int64)
    scorer.logprobs(
        torch.zeros(tokens, 1, dtype=torch.bfloat16),
        Predictions(numbers, numbers, numbers.float(), None),
    )
    return sizes


@pytest.mark.parametrize(("free", "most"), [(40 << 30, 1766), (2 << 30, 883)])
def test_a_gpu_makes_logits_in_large_chunks_as_far_as_they_fit(
    free: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 0)
    assert max(chunks("cuda", 4000, monkeypatch)) == most
    assert chunks("cuda", 500, monkeypatch) == [500]


def test_a_cpu_makes_logits_in_chunks_that_stay_in_its_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chunks("cpu", 300, monkeypatch) == [110, 110, 80]


@pytest.fixture
def gpu_parameters() -> Iterator[list[nn.Parameter]]:
    with FakeTensorMode():
        yield [nn.Parameter(torch.empty(4, device="cuda")) for _ in range(3)]


def test_adam_takes_all_parameters_at_once_on_a_gpu_and_one_after_the_other_on_a_cpu(
    gpu_parameters: list[nn.Parameter],
) -> None:
    assert adapter_io.new_optimizer(gpu_parameters).defaults["foreach"] is True
    on_cpu = adapter_io.new_optimizer([nn.Parameter(torch.zeros(4))])
    assert on_cpu.defaults["foreach"] is False


class Reads(TorchDispatchMode):
    """Counts the numbers that are read from tensors: on a GPU each waits for all work before it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_one_number_is_read_to_see_that_all_parameters_are_finite() -> None:
    parameters = {str(n): nn.Parameter(torch.zeros(3)) for n in range(200)}
    with Reads() as reads:
        assert adapter_io.not_finite(parameters) is None
    assert reads.count <= 1
    parameters["150"].data[1] = float("nan")
    assert adapter_io.not_finite(parameters) == "150"


def test_a_gpu_that_is_named_is_the_one_that_kernels_run_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert torch_device("cuda:1") == torch.device("cuda:1")
    torch_device("cpu")
    torch_device("cuda")
    assert chosen == [torch.device("cuda:1")]

"""What a GPU does in few large pieces: logits, the optimizer, checks of numbers; and which GPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from langchain_art_server.backends.models.device import torch_device
from langchain_art_server.backends.peft import adapter_io
from langchain_art_server.backends.peft.logprob_scoring import Predictions, Scorer

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

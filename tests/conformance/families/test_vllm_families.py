"""Every family that the docs name, on the real vLLM: sampling, tool calls, training and swaps.

`make test-vllm` runs latent attention; `test_vllm_sampler.py` is of Qwen3, plain attention.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import ArtError
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.process import root_causes
from tests.support.families import (
    LORA,
    LORAS,
    ON_VLLM,
    VllmSamples,
    check_frame,
    check_row,
    go_through,
    on_vllm,
    save_family,
    vllm_row,
)
from tests.support.soak import in_soak
from tests.support.vllm_engine import vllm_table

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
#: Beside LoRA, vLLM has no kernel for experts but Triton's, wherever the adapters are.
TRITON = "AttributeError: module 'triton.language' has no attribute 'float32'"
#: What vLLM says of the families that its build for a CPU does not run.
REFUSED = {"Qwen3 MoE": TRITON, "DeepSeek V3, Kimi K2": TRITON, "gpt-oss": TRITON}
RUN = [family for family in ON_VLLM if family not in REFUSED]
#: Those that `make test-vllm` runs.
PART = ("DeepSeek V3, its dense layers",)
#: On a CPU with AMX, vLLM's latent attention is a kernel for bfloat16 unless another one is named.
ANY_DTYPE = {"args": ["--attention-backend=CPU_MLA"]}


def started(family: str, folder: Path) -> AbstractContextManager[VllmSamples]:
    latent = ANY_DTYPE if family.startswith("DeepSeek") else {}
    model = save_family(family, folder / "model", wide=True)
    return on_vllm(model, folder / "data", sampler=vllm_table(**latent))


def sliced(families: Iterable[str]) -> list[Any]:
    def marks(family: str) -> list[pytest.MarkDecorator]:
        soak = [in_soak, pytest.mark.soak("V1", 1, f"{family} on vLLM")]
        return [] if family in PART else soak

    return [pytest.param(family, marks=marks(family)) for family in families]


@pytest.mark.parametrize("family", sliced(RUN))
def test_what_vllm_sampled_is_what_is_trained(family: str, tmp_path: Path) -> None:
    with started(family, tmp_path) as sampler:
        learner = LearnerCore(str(tmp_path / "model"), "cpu")
        one = go_through(sampler, learner, tmp_path, LORAS.get(family, LORA))
    assert max(one.gaps) <= 1e-4  # also after each swap: a version that was not loaded is far off
    assert one.moved > 0.01
    assert one.base_stayed
    assert one.tool_calls == 2
    assert {"o_proj"} <= set(one.targets)
    check_row(vllm_row(family, one), on_vllm=True)


@pytest.mark.parametrize("family", sliced(REFUSED))
def test_what_vllm_does_not_run_it_still_does_not_run(family: str, tmp_path: Path) -> None:
    """If it runs now, take it out of `REFUSED`."""
    with pytest.raises(ArtError), started(family, tmp_path):
        pass
    log = (tmp_path / "data" / "vllm.log").read_text()
    why = next(iter(root_causes(log)), log[-8000:])
    assert why == REFUSED[family]
    check_row(vllm_row(family, why), on_vllm=True)


def test_the_page_names_every_family() -> None:
    check_frame(on_vllm=True)

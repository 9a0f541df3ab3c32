"""Every family that the docs name, on the real vLLM: sampling, tool calls, training and swaps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from langchain_art.errors import ArtError
from langchain_art_server.backends.peft.engine import PeftEngine
from langchain_art_server.backends.vllm.process import root_causes
from tests.support.families import (
    FAMILIES,
    LORA,
    LORAS,
    Outcome,
    VllmSamples,
    check_page,
    go_through,
    on_vllm,
    save_family,
    vllm_page,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
#: Beside LoRA, vLLM has no kernel for experts but Triton's, wherever the adapters are.
TRITON = "AttributeError: module 'triton.language' has no attribute 'float32'"
#: What vLLM says of the families that its build for a CPU does not run.
REFUSED = {"Qwen3 MoE": TRITON, "DeepSeek V3, Kimi K2": TRITON}
RUN = [family for family in FAMILIES if family not in REFUSED]
#: How many are started at once: a start is three processes that import, one after the other.
AT_ONCE = 3


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome | str]:
    folders = {family: tmp_path_factory.mktemp("family") for family in FAMILIES}
    for family, folder in folders.items():
        save_family(family, folder / "model", wide=True)
    found: dict[str, Outcome | str] = {}
    names = list(FAMILIES)
    for at in range(0, len(names), AT_ONCE):
        found |= outcomes_of({name: folders[name] for name in names[at : at + AT_ONCE]})
    return found


def outcomes_of(folders: dict[str, Path]) -> dict[str, Outcome | str]:
    """What was seen of families that are started together, or what vLLM died of."""
    found: dict[str, Outcome | str] = {}
    with ExitStack() as stack, ThreadPoolExecutor(len(folders)) as pool:

        def start(folder: Path) -> VllmSamples | ArtError:
            try:
                return stack.enter_context(on_vllm(folder / "model", folder / "data"))
            except ArtError as error:
                return error

        for family, sampler in zip(folders, pool.map(start, folders.values()), strict=True):
            folder = folders[family]
            if isinstance(sampler, ArtError):
                log = (folder / "data" / "vllm.log").read_text()
                found[family] = next(iter(root_causes(log)), log[-8000:])
            else:
                learner = PeftEngine(str(folder / "model"), "cpu")
                found[family] = go_through(sampler, learner, folder, LORAS.get(family, LORA))
    return found


@pytest.mark.parametrize("family", RUN)
def test_what_vllm_sampled_is_what_is_trained(
    family: str, outcomes: dict[str, Outcome | str]
) -> None:
    one = outcomes[family]
    assert isinstance(one, Outcome), one
    assert max(one.gaps) <= 1e-4  # also after each swap: a version that was not loaded is far off
    assert one.moved > 0.01
    assert one.base_stayed
    assert one.tool_calls == 2
    assert {"o_proj"} <= set(one.targets)


@pytest.mark.parametrize("family", REFUSED)
def test_what_vllm_does_not_run_it_still_does_not_run(
    family: str, outcomes: dict[str, Outcome | str]
) -> None:
    """If it runs now, take it out of `REFUSED`."""
    assert outcomes[family] == REFUSED[family]


def test_the_page_says_what_was_seen(outcomes: dict[str, Outcome | str]) -> None:
    check_page(vllm_page(outcomes), on_vllm=True)

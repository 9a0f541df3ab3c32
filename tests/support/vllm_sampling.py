"""The real vLLM behind its sampler, started once for all tests of this folder."""

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings
from tests.support.tiny_models import save_model, three_adapters
from tests.support.vllm_engine import command, gone, guard_of, vllm_of, vllm_table

#: Of tests that share one vLLM, for `pytestmark`.
OF_THE_SAMPLER = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm-sampler"),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", head_dim=32)


@pytest.fixture(scope="session")
def vllm_adapters(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return three_adapters(tmp_path_factory.mktemp("adapters"), vllm_model)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_sampler(
    vllm_model: Path, vllm_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmSampler]:
    data_dir = tmp_path_factory.mktemp("vllm")
    made = VllmSampler(
        Settings.model_validate(
            {
                "model": str(vllm_model),
                "data_dir": data_dir,
                "sampler": vllm_table(hang_seconds=20),
                "take_turns": True,
            }
        )
    )
    await made.start()
    for name, path in vllm_adapters.items():
        await made.load_adapter(name, path)
    yield made
    held = [guard_of(pid_of(made)), *vllm_of(pid_of(made))]
    folder = Path(command(held[0])[3])
    assert len(held) >= 3 and folder.is_dir()
    await made.close()
    assert gone(held)
    assert not folder.exists()


def pid_of(sampler: VllmSampler) -> int:
    assert sampler.pid is not None
    return sampler.pid


async def chat(sampler: VllmSampler, request: ChatRequest) -> ChatReply:
    items = [item async for item in sampler.chat(request)]
    reply = items[-1]
    assert isinstance(reply, ChatReply)
    if request.stream:
        pieces = [item for item in items[:-1] if isinstance(item, ChatDelta)]
        assert "".join(piece.content for piece in pieces) == (reply.content or "")
        assert [call for piece in pieces for call in piece.tool_calls] == reply.tool_calls
    numbers = ("prompt_token_ids", "token_ids", "logprobs")
    return dataclasses.replace(reply, **{n: list(getattr(reply, n)) for n in numbers})

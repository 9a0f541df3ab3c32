"""Calls with images on the real vLLM: the plain model's numbers, the embedded sampler's records."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from langchain_art_server.backends.base import ChatReply
from langchain_art_server.backends.models.images import probe_image
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.conformance.learner.test_images import (
    BLUE,
    RED,
    TARGETS,
    asked,
    message,
    plain_logprobs,
    rows_of,
)
from tests.support.families import VllmSamples, on_vllm
from tests.support.soak import in_soak
from tests.support.tiny_models import LocalSampler, save_adapter, with_adapter
from tests.support.vision_models import picture, save_vision_model
from tests.support.vllm_engine import vllm_table

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("vllm-images"),
]
SOAK = [in_soak, pytest.mark.soak("V2", 1, "a second family with images on vLLM")]
#: Noise, which two ways to resize make two images of; and one that is transparent.
NOISE, GLASS = probe_image(), picture((200, 30, 90, 100))
SEEN = [(RED,), (BLUE,), (RED, BLUE), (), (RED, RED), (NOISE,), (GLASS,)]


# vLLM wants a processor of videos with Qwen's models, and a line break among Gemma's tokens: the
# small models of these families have neither.
@pytest.fixture(scope="module", params=["LLaVA", pytest.param("SmolVLM", marks=SOAK)])
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmSamples, Path]]:
    folder = tmp_path_factory.mktemp("seeing")
    # The fewest dimensions of a head that vLLM has on a CPU.
    model = save_vision_model(folder / "model", request.param, hidden_size=64, head_dim=32)
    with on_vllm(model, folder / "data", sampler=vllm_table()) as sampler:
        yield sampler, model


def test_vllm_the_plain_model_and_the_learner_have_the_same_numbers(
    seeing: tuple[VllmSamples, Path], tmp_path: Path
) -> None:
    sampler, model = seeing
    adapter = save_adapter(tmp_path / "a", model, 1, target_modules=TARGETS)
    sampler.load("a@1", adapter)
    requests = [
        asked(
            message("see ", *bodies, "?"),
            images=bodies,
            adapter="a@1",
            seed=n,
            top_logprobs=3 * (n % 2),
            stream=n > 1,
        )
        for n, bodies in enumerate(SEEN)
    ]
    replies = sampler.chat(*requests)
    again = sampler.chat(*requests)  # after their cached prefixes
    embedded = LocalSampler(model)
    embedded.load("a@1", adapter)
    ours = embedded.chat(*requests)
    tuned, learner = with_adapter(model, adapter), LearnerCore(str(model), "cpu")
    found = learner.logprobs(adapter, rows_of(*zip(replies, SEEN, strict=True)))
    for one, repeated, own, trained, bodies in zip(replies, again, ours, found, SEEN, strict=True):
        assert one.prompt_token_ids == own.prompt_token_ids
        assert repeated.token_ids == one.token_ids
        assert all(len(top) in (0, 3) for top in one.top_logprobs)
        logprobs = torch.tensor(one.logprobs)
        for others in (
            torch.tensor(repeated.logprobs),
            torch.tensor(trained[len(one.prompt_token_ids) :]),
            plain_logprobs(tuned, model, one, *bodies),
        ):
            assert (logprobs - others).abs().max() < 1e-4
    sampler.unload("a@1")


def test_a_later_turn_repeats_the_image_and_what_was_sampled(
    seeing: tuple[VllmSamples, Path],
) -> None:
    sampler, _ = seeing
    question = message("see ", RED)

    def shown(reply: ChatReply) -> bool:
        return bool(reply.content) and str(reply.content).isprintable()

    drawn = sampler.chat(*(asked(question, images=(RED,), seed=n, max_tokens=3) for n in range(32)))
    reply = next(one for one in drawn if shown(one))
    said = {"role": "assistant", "content": reply.content}
    request = asked(question, said, message("and ", BLUE), images=(RED, BLUE), seed=3)
    (later,) = sampler.chat(request)
    known = [*reply.prompt_token_ids, *reply.token_ids]
    assert later.prompt_token_ids[: len(known)] == known

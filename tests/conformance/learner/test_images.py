"""Calls with images: sampler, learner and the plain model have the same numbers."""

# pyright: reportPrivateUsage=false

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from langchain_art.errors import ArtError, ConfigError, InvalidRequest
from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art.wire.images import image_reference
from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS
from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from langchain_art_server.backends.base import ChatReply, ChatRequest, LearnerStep
from langchain_art_server.backends.ipc.step_codec import read_rows, write_rows
from langchain_art_server.backends.models.base_weights import load_causal
from langchain_art_server.backends.models.images import Images, without_videos
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.families import save_family
from tests.support.soak import in_soak_alone
from tests.support.tiny_models import LocalSampler, ask, save_adapter, with_adapter
from tests.support.vision_models import (
    GEMMA,
    TEMPLATE,
    VISION_FAMILIES,
    opened,
    picture,
    save_vision_model,
)

RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255), (20, 60), "JPEG")
#: Every linear layer of the text model: `all-linear` would have those that see, too.
TARGETS = r"model\.(language|text)_model.*\.(q|k|v|o|gate|up|down)_proj"


def message(*said: str | bytes) -> dict[str, Any]:
    """A user's message of texts and images."""
    parts = [
        {"type": "text", "text": p} if isinstance(p, str) else image_reference(p) for p in said
    ]
    return {"role": "user", "content": parts}


def asked(*messages: dict[str, Any], images: tuple[bytes, ...], **options: Any) -> ChatRequest:
    named = {image_reference(one)["sha256"]: base64.b64encode(one).decode() for one in images}
    return ask(messages=list(messages), images=named, **options)


def plain_logprobs(model: Any, folder: Path, reply: ChatReply, *bodies: bytes) -> torch.Tensor:
    """What the whole model gives the reply's tokens, by its own way with the images' pixels.

    Where a reply has the token of images itself, which that way takes for another image, up to it.
    """
    with without_videos():
        processor: Any = AutoProcessor.from_pretrained(folder, backend="pil")
    own: int = model.config.image_token_id
    said = [*reply.token_ids, own]
    said = reply.token_ids[: said.index(own) + 1]
    ids = [*reply.prompt_token_ids, *said[:-1]]
    ids = torch.tensor([[own if one >= IMAGE_IDS else one for one in ids]])
    pixels: dict[str, Any] = {}
    if bodies:
        made = processor(
            text=[processor.image_token * len(bodies)],
            images=[opened(one) for one in bodies],
            return_tensors="pt",
        )
        pixels = {k: v for k, v in made.items() if k.startswith(("pixel", "image_grid"))}
        for name in {"mm_token_type_ids", "token_type_ids"} & made.keys():
            pixels[name] = (ids == own).long()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **pixels).logits[0].float()
    rows = logits[len(reply.prompt_token_ids) - 1 :].log_softmax(-1)
    return rows.gather(1, torch.tensor(said)[:, None])[:, 0]


def nothing(_fraction: float, _message: str) -> None: ...


def rows_of(*calls: tuple[ChatReply, tuple[bytes, ...]], advantage: float = 1.0) -> list[Any]:
    return [
        row
        for number, (reply, bodies) in enumerate(calls)
        for row in rows_of_run(
            [
                SampledCall(
                    f"c{number}",
                    reply.prompt_token_ids,
                    reply.token_ids,
                    reply.logprobs,
                    advantage=advantage,
                    images={image_reference(one)["sha256"]: one for one in bodies},
                )
            ]
        )
    ]


@pytest.mark.parametrize(
    "family",
    # `test_image_positions` has numbers and gradients of those whose positions differ.
    [*VISION_FAMILIES[:2], *map(in_soak_alone, VISION_FAMILIES[2:])],
)
def test_sampler_and_learner_have_the_plain_model_s_numbers_and_a_step_learns(
    family: str, tmp_path: Path
) -> None:
    model = save_vision_model(tmp_path / "model", family)
    adapter = save_adapter(tmp_path / "a", model, 1, target_modules=TARGETS)
    sampler = LocalSampler(model)
    sampler.load("a@1", adapter)
    seen = [(RED,), (BLUE,), (RED, BLUE), (), (BLUE, BLUE)]
    requests = [
        asked(message("see ", *bodies, "?"), images=bodies, adapter="a@1", seed=n)
        for n, bodies in enumerate(seen)
    ]
    replies = sampler.chat(*requests)
    again = sampler.chat(*requests)  # after their cached prefixes
    tuned = with_adapter(model, adapter)
    for reply, repeated, bodies in zip(replies, again, seen, strict=True):
        expected = plain_logprobs(tuned, model, reply, *bodies)
        found = torch.tensor(reply.logprobs[: len(expected)])
        assert (found - expected).abs().max() < 1e-5
        assert repeated.token_ids == reply.token_ids
        assert repeated.logprobs == reply.logprobs
    first, second, both, *_ = (reply.prompt_token_ids for reply in replies)
    own = [one for one in first if one >= IMAGE_IDS]
    assert own and not {*own} & {*second}
    assert both[: first.index(own[-1]) + 1] == first[: first.index(own[-1]) + 1]
    assert sampler.host._prefixes is not None and sampler.host._prefixes.hit_tokens > 0

    core = LearnerCore(str(model), "cpu")
    assert core.packer.padded_because is None
    rows = rows_of(*zip(replies, seen, strict=True))
    write_rows(tmp_path / "rows.npz", rows)
    read = read_rows(tmp_path / "rows.npz")
    assert read == rows
    found = core.logprobs(adapter, read)
    for reply, logprobs in zip(replies, found, strict=True):
        gap = torch.tensor(reply.logprobs) - torch.tensor(logprobs[len(reply.prompt_token_ids) :])
        assert gap.abs().max() < 1e-5

    (reply,) = sampler.chat(asked(message("see ", RED), images=(RED,), seed=1))
    rows = rows_of((reply, (RED,)))
    start, out = tmp_path / "v0", tmp_path / "v1"
    start.mkdir()
    out.mkdir()
    core.init_adapter(start, LoraConfig())
    step = LearnerStep(start, out, 1, rows, TrainConfig(learning_rate=1e-3))
    metrics = core.step(step, nothing)
    assert metrics["logprob_gap_max"] < 1e-5
    other = rows_of((replies[1], (BLUE,)))
    with core._seeing(other), pytest.raises(ArtError, match="without the image"):
        core.base(input_ids=torch.tensor([rows[0].token_ids]))
    (before,), (after,) = (core.logprobs(version, rows) for version in (start, out))
    assert after.sum() > before.sum() + 1e-3


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "model")
    sampler = LocalSampler(model)
    with pytest.raises(InvalidRequest, match="expected as many"):
        sampler.chat(asked(message(RED, "<image>"), images=(RED,)))
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        sampler.chat(asked(message(b"no image"), images=(b"no image",)))
    # A template that ends with an image.
    (model / "chat_template.jinja").write_text(
        TEMPLATE.rpartition("<image>")[0]
        + "<image>{%- endif %}{%- endfor %}{% endif %}{% endfor %}"
    )
    assert "with text behind it" in LocalSampler(model).host.info.no_images


@pytest.mark.parametrize(
    "family, why",
    [
        ("Qwen3", "Qwen3ForCausalLM reads text only"),
        ("Gemma 3, with images", "its processor cannot show one"),
    ],
)
def test_a_base_that_sees_nothing_says_why(family: str, why: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "model")
    assert LocalSampler(model).host.info.no_images.startswith(why)
    core = LearnerCore(str(model), "cpu")
    assert core.info["no_images"].startswith(why)
    rows = [Row([1, 2], [0, 1], [0.0, -1.0], [0.0, 1.0], images={"a": RED})]
    with pytest.raises(ConfigError, match="the learner reads none"), core._seeing(rows):
        pass


@pytest.mark.parametrize("family", ["Qwen2.5-VL", GEMMA])
def test_a_model_that_reads_images_in_another_way_says_so(family: str, tmp_path: Path) -> None:
    model = save_vision_model(tmp_path, family)
    images = Images(str(model), load_causal(str(model), torch.float32, torch.device("cpu")))
    assert images.why_not(RED) == ""
    images.whole, images._place = False, None
    images._kept.clear()
    assert "more than embeddings with positions" in images.why_not(RED)

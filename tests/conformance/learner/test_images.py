"""Calls with images: sampler, learner and the plain model have the same numbers."""

# pyright: reportPrivateUsage=false

import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoProcessor

from langchain_art.errors import ArtError, ConfigError, InvalidRequest
from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art.wire.images import image_reference
from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS
from langchain_art_server.algorithms.sequences.prefix_forest import PartCosts
from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from langchain_art_server.backends.base import ChatReply, ChatRequest, LearnerStep
from langchain_art_server.backends.embedded import model_runner, scheduler
from langchain_art_server.backends.ipc.step_codec import read_rows, write_rows
from langchain_art_server.backends.models.base_weights import load_causal
from langchain_art_server.backends.models.delta_nets import delta_nets
from langchain_art_server.backends.models.images import Images, without_videos
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.forest.delta_nets import install
from langchain_art_server.backends.peft.forest.packing import FOREST_ATTENTION, ForestRows
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import CountedTokens, PaddedRows, Scorer
from tests.conformance.learner.test_learner_forest import recurrent_rule
from tests.support.families import save_family
from tests.support.soak import in_soak_alone
from tests.support.tiny_models import LocalSampler, ask, load_plain, save_adapter, with_adapter
from tests.support.vision_models import (
    GEMMA,
    QWENS,
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
    # Below are numbers and gradients of those whose positions differ.
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


@pytest.mark.parametrize("family", QWENS)
def test_positions_of_any_sequence_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = save_vision_model(tmp_path, family)
    base: Any = load_causal(str(model), torch.float32, torch.device("cpu"))
    images = Images(str(model), base)
    red, blue = images.read("a", RED), images.read("b", BLUE)
    images.hold([red, blue])
    assert images.shifts([1, 2, 3]) is None
    grids = {
        id(one): images._inputs(images.placeholder, body)
        for one, body in ((red, RED), (blue, BLUE))
    }
    for shown in ([red], [blue, red], [red, red, blue]):
        ids, own = [1, 2, 3], list[int]()
        for one in shown:
            ids += [*one.ids, 4, 5]
        own = [images.token if one >= IMAGE_IDS else one for one in ids]
        shifts = images.shifts(ids)
        assert shifts is not None
        expected, behind = base.model.get_rope_index(
            torch.tensor([own]),
            mm_token_type_ids=torch.tensor([ids]).ge(IMAGE_IDS).long(),
            image_grid_thw=torch.cat([grids[id(one)]["image_grid_thw"] for one in shown]),
        )
        found = np.arange(len(ids) + 1) + shifts[:3]
        assert found[:, :-1].tolist() == expected[:, 0].tolist()
        assert found[:, -1].tolist() == [len(ids) + behind.item()] * 3


def no_slots(_model: Any) -> None:
    raise model_runner.SlotsUnsupported("of this test")


@pytest.mark.parametrize(
    "family, slots",
    [
        *(("Qwen3-VL", False), ("Qwen3.5", True)),
        *(in_soak_alone(*one) for one in (("Qwen3-VL", True), ("Qwen3.5", False), (GEMMA, True))),
        *(in_soak_alone("Qwen2.5-VL", slots) for slots in (True, False)),
    ],
)
def test_rows_keep_their_positions_whoever_joins_and_leaves(
    family: str, slots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are computed in parts that end within an image; rows are sent back, and go on."""
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 7)
    if not slots:
        monkeypatch.setattr(model_runner, "_layout", no_slots)
        bidirectional = LocalSampler(save_vision_model(tmp_path / "gemma", GEMMA))
        assert "its calls have no slots" in bidirectional.host.info.no_images
    model = save_vision_model(tmp_path / "model", family)
    sampler, plain = LocalSampler(model), load_plain(model)
    seen = [(RED,), (BLUE, RED), (), (RED,), (RED, BLUE), (BLUE,), (RED,), (RED,)]
    calls = []
    with torch.inference_mode():
        for n, bodies in enumerate(seen):
            said = message("see ", *bodies, "?")
            calls.append(sampler.send(asked(said, images=bodies, seed=n, max_tokens=9)))
            sampler.turn()
            rows = sampler.host.scheduler._rows
            if n % 3 == 2 and rows:
                sampler.host.scheduler._preempt(rows[n % len(rows)])
        sampler.run()
    replies: list[ChatReply] = [sampler.reply(call) for call in calls]
    assert sampler.host.scheduler.preempted > 0
    reply = next(one for one in replies if one.content and one.content.isprintable())
    bodies = seen[replies.index(reply)]
    said = {"role": "assistant", "content": reply.content}
    begun = message("see ", *bodies, "?"), said
    shown = (*bodies, BLUE)
    (later,) = sampler.chat(asked(*begun, message("and ", BLUE), images=shown, seed=3))
    known = [*reply.prompt_token_ids, *reply.token_ids]
    assert later.prompt_token_ids[: len(known)] == known
    all_calls = list(zip([*replies, later], [*seen, shown], strict=True))
    scored = LearnerCore(str(model), "cpu").logprobs(None, rows_of(*all_calls))
    for (one, of), logprobs in zip(all_calls, scored, strict=True):
        found = torch.tensor(one.logprobs)
        expected = plain_logprobs(plain, model, one, *of)
        assert (found[: len(expected)] - expected).abs().max() < 1e-5
        of_learner = torch.tensor(logprobs[len(one.prompt_token_ids) :])
        assert (found - of_learner).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        *((one, 8) for one in (*QWENS, GEMMA)),
        *(in_soak_alone(one, 10_000) for one in (*QWENS, GEMMA)),
    ],
)
def test_a_forest_with_images_is_the_rows_one_by_one(
    family: str, budget: int, tmp_path: Path, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs, and the gradient by all embeddings, in float64."""
    one = Scorer(
        load_causal(str(save_vision_model(tmp_path, family)), torch.float64, torch.device("cpu"))
    )
    images = Images(str(tmp_path), one.base)
    red, blue = images.read("a", RED), images.read("b", BLUE)
    images.hold([red, blue])
    begun = [1, 5, 9, *red.ids]
    sequences = [
        [*begun, 10, 11, 12, 13],
        [*begun, 10, 11, 20, 21, 22],
        [*begun, 10, 11, *blue.ids, 30, 31, 32],
        [*begun, 10, 11, *blue.ids, 30, 60, 61, *red.ids, 62],
        [1, 5, 9, *blue.ids, 10, 40],
        [7, 8, 9],
    ]
    rows = [
        Row(ids, [0, *(int(x < IMAGE_IDS) for x in ids[1:])], [0.0] * len(ids), [0.0] * len(ids))
        for ids in sequences
    ]
    expected, gradient = list[Tensor](), torch.zeros(32, dtype=torch.float64)
    layers = delta_nets(one.base)
    with monkeypatch.context() as patched:
        for layer in layers[:1]:
            functions = vars(sys.modules[type(layer).__module__])
            patched.setitem(functions, "torch_chunk_gated_delta_rule", recurrent_rule)
        for row in rows:
            counted = CountedTokens.of([row])
            alone = PaddedRows([row], counted, one.base, images)
            logprobs, of_row = packer._both_passes(alone, one, counted)
            expected.append(logprobs)
            gradient += of_row
    install(layers)
    one.base.set_attn_implementation(FOREST_ATTENTION)
    counted = CountedTokens.of(rows)
    forest = ForestRows(rows, counted, budget, float("inf"), one.base, PartCosts(), images)
    assert forest.tokens < sum(map(len, sequences)) - 3 * len(begun)
    found, of_forest = packer._both_passes(forest, one, counted)
    assert (found - torch.cat(expected)).abs().max() < 1e-12
    assert ((of_forest - gradient).norm() / gradient.norm()).item() < 1e-12

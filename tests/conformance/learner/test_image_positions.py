"""Images whose tokens have places in three dimensions, on the ways where these could be lost.

Plain calls of such models are among those of `test_images`.
"""

# pyright: reportPrivateUsage=false

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS
from langchain_art_server.algorithms.sequences.prefix_forest import PartCosts
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import ChatReply
from langchain_art_server.backends.embedded import model_runner, scheduler
from langchain_art_server.backends.models.base_weights import load_causal
from langchain_art_server.backends.models.delta_nets import delta_nets
from langchain_art_server.backends.models.images import Images
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.forest.delta_nets import install
from langchain_art_server.backends.peft.forest.packing import FOREST_ATTENTION, ForestRows
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import CountedTokens, PaddedRows, Scorer
from tests.conformance.learner.test_delta_nets import recurrent_rule
from tests.conformance.learner.test_images import (
    BLUE,
    RED,
    asked,
    message,
    plain_logprobs,
    rows_of,
)
from tests.support.soak import in_soak_alone
from tests.support.tiny_models import LocalSampler, load_plain
from tests.support.vision_models import GEMMA, QWENS, save_vision_model


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
    [("Qwen3-VL", False), ("Qwen3.5", True), in_soak_alone(GEMMA, True)],
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


@pytest.mark.parametrize("family", [*QWENS, GEMMA])
def test_a_forest_with_images_is_the_rows_one_by_one(
    family: str, tmp_path: Path, exact: None, monkeypatch: pytest.MonkeyPatch
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
    forest = ForestRows(rows, counted, 8, float("inf"), one.base, PartCosts(), images)
    assert forest.tokens < sum(map(len, sequences)) - 3 * len(begun)
    found, of_forest = packer._both_passes(forest, one, counted)
    assert (found - torch.cat(expected)).abs().max() < 1e-12
    assert ((of_forest - gradient).norm() / gradient.norm()).item() < 1e-12

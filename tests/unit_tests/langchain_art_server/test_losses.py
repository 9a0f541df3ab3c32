"""The promises of a loss: kept by the built-in ones, and each broken by one that must be found."""

import pytest
import torch

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import DPPOTV, GSPO, ClippedRatio, KLPenalty, OwnLoss, TrainConfig
from langchain_art_server.algorithms.loss.objective import TrainedTokens, objective
from langchain_art_server.algorithms.loss.own_loss import load_losses
from langchain_art_server.config import Settings
from langchain_art_server.losses import LossFunction, check_loss
from tests.support import own_losses

torch.set_num_threads(1)
MODULE = "tests.support.own_losses"


@pytest.mark.parametrize(
    "function", [own_losses.clipped, own_losses.by_call, own_losses.weighted, own_losses.bounded]
)
def test_the_built_in_losses_keep_all_promises(function: LossFunction) -> None:
    check_loss(function, policy_gradient=True)


def test_options_reach_the_function_and_a_policy_gradient_is_no_duty() -> None:
    check_loss(own_losses.clipped, policy_gradient=True, low=0.1, high=0.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bound'"):
        check_loss(own_losses.clipped, bound=0.1)
    check_loss(own_losses.imitating)
    with pytest.raises(AssertionError, match="policy gradient: got"):
        check_loss(own_losses.imitating, policy_gradient=True)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (own_losses.summed, r"'summed' gave torch.float32 of shape \[\], expected .* shape \[1\]"),
        (own_losses.in_half, r"gave torch.float16 of shape .*, expected torch.float32"),
        (own_losses.overflowing, "finite: got the (loss|gradient)"),
        (own_losses.drawing, "pure: the same tokens gave other losses"),
        (own_losses.changing, "pure: the function has changed the tensors"),
        (own_losses.by_place, "order: got the losses"),
        (own_losses.over_the_batch, "packing: got the losses"),
        (own_losses.detached, "losses without a gradient"),
        (own_losses.upside_down, "policy gradient: got"),
        (own_losses.against_the_mean, "mask: got the gradient .* at excluded tokens"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_each_broken_promise_is_found(function: LossFunction, words: str) -> None:
    with pytest.raises((AssertionError, ArtError), match=words):
        check_loss(function, policy_gradient=function is own_losses.upside_down)


@pytest.mark.parametrize(
    ("built_in", "own"),
    [
        (ClippedRatio(clip_low=0.1), OwnLoss(name="clipped", options={"low": 0.1})),
        (GSPO(clip_low=0.2, clip_high=0.28), OwnLoss(name="by_call", aggregation="sequence")),
        (DPPOTV(), OwnLoss(name="bounded", importance_sampling=None)),
    ],
)
def test_a_built_in_loss_as_an_own_one_gives_the_same_bits(
    built_in: ClippedRatio | GSPO | DPPOTV, own: OwnLoss
) -> None:
    draw = torch.Generator().manual_seed(5)
    losses = load_losses({own.name: f"{MODULE}:{own.name}"})

    def logprobs() -> torch.Tensor:
        return -5 * torch.rand(40, generator=draw)

    new_T, old_T = logprobs().requires_grad_(), logprobs()
    tokens = TrainedTokens(logprobs(), logprobs() + 2.5, logprobs() / -100, torch.arange(40) // 7)
    found = [
        objective(
            tokens,
            new_T,
            old_T,
            old_T + 0.1,
            TrainConfig(loss=loss, guard=None, kl=KLPenalty(estimator="k3", coefficient=0.1)),
            losses,
        )
        for loss in (built_in, own)
    ]
    slopes = [torch.autograd.grad(loss, new_T)[0] for loss, _ in found]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(*slopes)
    assert found[0][1] == found[1][1], "the statistics, where bounds acted included"
    assert found[0][1].clipped_high, "and they did"


def test_what_is_not_there_is_refused_by_name() -> None:
    for where, words in (
        ("tests.support.nowhere:mine", "nowhere' cannot be imported|No module named"),
        (f"{MODULE}:nothing", "has no attribute 'nothing'"),
        (f"{MODULE}:__name__", "expected a function"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_losses({"mine": where})
    with pytest.raises(ValueError, match="'gspo', a built-in loss"):
        Settings(model="m", losses={"gspo": f"{MODULE}:clipped"})
    with pytest.raises(ValueError, match=r"losses.mine: got 'clipped', expected MODULE:FUNCTION"):
        Settings(model="m", losses={"mine": "clipped"})

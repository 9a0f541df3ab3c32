"""The gap between the sampler's and the learner's logprobs; a large one refuses a step. Torch only.

A sampler with another model, adapter, temperature or token order than the learner still gives
tokens, rewards and a loss, and the policy learns nothing or gets worse. The mean gap shows it on
the first step: healthy engines differ by 1e-6 nats per token in float32 and up to 0.03 in bfloat16;
at a divergence of 0.013, about 0.16 nats, runs have collapsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from langchain_art.errors import ArtError

#: Temperatures that are tried as an explanation of the gap: 0.05, 0.1 … 2.
TEMPERATURES = [step / 20 for step in range(1, 41)]
EXPLAINED = 0.5  # A fault explains the gap if it leaves less than this share of it


class Suspect(NamedTuple):
    """A possible fault, and the share of the gap that it does not explain."""

    left: float
    fault: str


def check_sync(
    metrics: Mapping[str, float],
    max_logprob_gap: float | None,
    staleness: float = 0.0,
    suspects: Callable[[], Sequence[Suspect]] = tuple,
) -> None:
    """Refuse a step whose tokens another model or setting sampled.

    The bound grows with `staleness`, as older versions differ more:
    ``max_logprob_gap * (1 + staleness)``.

    Raises ArtError: the gap is over the bound; names the fault that explains it best.

    Args:
        metrics: reads ``logprob_gap_mean`` and ``logprob_gap_max`` of `LossStats.metrics`.
        max_logprob_gap: the bound at staleness 0, in nats per token; None: never refuse.
        staleness: mean number of versions between a trained call's sampler and the learner.
        suspects: called only if the step is refused; see `suspects_of`.
    """
    if max_logprob_gap is None:
        return
    gap, bound = metrics["logprob_gap_mean"], max_logprob_gap * (1 + staleness)
    if not gap > bound:
        return
    found = min(suspects(), key=lambda suspect: suspect.left, default=None)
    if found is None or not found.left < EXPLAINED:
        cause = (
            "No usual fault explains it: see that both run the same model files, adapter version "
            "and tokenizer, in comparable precision."
        )
    else:
        cause = f"{found.fault}; {found.left:.1%} of the distance would be left."
    if staleness:
        cause += (
            " Or the policy itself has moved so far since the tokens were drawn (version 0 is the "
            "base model): then draw new ones, lower `max_steps_ahead` or learning_rate, or raise "
            "max_logprob_gap."
        )
    raise ArtError(
        f"The step was refused: learner and sampler are {gap:.3g} nats apart per token, up to "
        f"{metrics['logprob_gap_max']:.4g} on one, expected at most {bound:.3g} on average "
        f"(max_logprob_gap={max_logprob_gap:g}, mean staleness {staleness:.3g}). {cause} "
        "Nothing was published."
    )


def suspects_of(
    own_T: Tensor,
    base_T: Tensor,
    at_temperatures: Mapping[float, Tensor],
    sampler_logprobs_T: Tensor,
    calls_T: Tensor,
    recorded: Sequence[float],
) -> list[Suspect]:
    """Share of the gap that each usual fault leaves, on some tokens.

    Args:
        own_T: the learner's logprobs, in nats; the tokens of a call stand in their order.
        base_T: the base model's.
        at_temperatures: the learner's, had the tokens been drawn at other temperatures.
        sampler_logprobs_T: what was recorded.
        calls_T: integers, equal for the tokens of one call.
        recorded: the temperatures recorded with the calls.
    """
    gap = _gap(own_T, sampler_logprobs_T)
    temperature, at = min(
        ((t, _gap(at_T, sampler_logprobs_T)) for t, at_T in at_temperatures.items()),
        key=lambda found: found[1],
    )
    same_T = calls_T[1:] == calls_T[:-1]  # the neighbour is of the same call
    after = _gap(own_T[1:][same_T], sampler_logprobs_T[:-1][same_T])
    before = _gap(own_T[:-1][same_T], sampler_logprobs_T[1:][same_T])
    named = " and ".join(f"{t:g}" for t in sorted(set(recorded))[:3])
    return [
        Suspect(
            _gap(base_T, sampler_logprobs_T) / gap,
            "The recorded logprobs are the base model's: the sampler did not apply the adapter",
        ),
        Suspect(
            at / gap,
            f"The recorded logprobs are those of temperature {temperature:g}, while the calls say "
            f"{named}: the sampler must report logprobs of the distribution that it draws from "
            "(vLLM: --logprobs-mode processed_logprobs)",
        ),
        Suspect(
            min(after, before) / gap,
            "The recorded logprobs are shifted by one against the token ids: each is that of the "
            f"token {'after' if after < before else 'before'} it",
        ),
    ]


def _gap(one_T: Tensor, other_T: Tensor) -> float:
    """Mean absolute difference; infinite without tokens."""
    return (one_T - other_T).abs().mean().item() if len(one_T) else float("inf")

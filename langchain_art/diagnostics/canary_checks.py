"""The canary's checks: statistics, thresholds and advice. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from langchain_art.wire import Wire

#: Standard errors; a false alarm has a probability of 1 in 1.7 million (two-sided).
SIGMAS = 5.0
#: Standard errors by which the reward must have risen. The probability by chance is 1 in 30,000 for
#: one comparison, and 1 in 1,200 for a canary that compares after each of 24 steps.
RISE = 4.0
#: Summed variance of logprobs below which `surprise` cannot be tested.
LEAST_VARIANCE = 10.0
#: The advice for a failed check, by the check's name up to a comma.
ADVICE = {
    "error": "Read the message and the server's log. Later checks were not made.",
    "captured": "The server does not record token ids and logprobs. Check that calls reach this "
    "server and no proxy, that its disk is not full, and that nothing sets top_p, top_k or a "
    "grammar.",
    "sampler = learner": "Both engines must run the same weights, adapter version and tokenizer in "
    "the same precision, and the sampler must report logprobs of the distribution that it samples "
    "from (vLLM: --logprobs-mode processed_logprobs). Do not train before this holds.",
    "drawn as reported": "Tokens are not sampled from the distribution of their logprobs: look for "
    "a default temperature, top_p or top_k (vLLM reads the model's generation_config.json unless "
    "--generation-config vllm is given).",
    "adapter changes replies": "The trained adapter is not served: check that the sampler loads "
    "adapters for this model's layers, and that its prefix cache is kept separate by adapter.",
    "base stays as it was": "Training or adapters change the base model or other versions: do not "
    "rely on any reply of this server.",
    "bare name serves the new version": "The server still routes to an old version: see "
    "`langchain-art checkpoints list` and the server's log.",
    "learns": "The other checks passed, but the reward does not rise: try twice the `--steps`, and "
    "a larger or smaller `--learning-rate`, before you look for a fault in the learner.",
}


class Check(Wire):
    """One condition that must hold before training."""

    name: str
    """``captured``, ``sampler = learner`` …"""
    passed: bool
    measured: str
    bar: str
    value: float | None = None
    """The measured number, if it is finite."""
    advice: str = ""
    """Empty if the check passed."""


class CanaryReport(Wire):
    """All checks of one canary, and the server's description."""

    base_url: str
    base_model: str
    dtype: str
    device: str
    sampler: str
    learner: str
    policy: str
    seconds: float
    checks: tuple[Check, ...]
    left: str
    """The data that the canary leaves on the server."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Metrics of the last training step."""

    @property
    def passed(self) -> bool:
        """True if the server can be trusted with a real run."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Token:
    """A sampled token: its text, its logprob, and the top logprobs at its position."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    def known(self) -> dict[str, float]:
        """Text -> logprob of the most likely tokens whose text is unique."""
        texts = Counter(text for text, _ in self.top)
        return {text: value for text, value in self.top if texts[text] == 1}


def tokens_of(metadata: Mapping[str, Any]) -> list[Token]:
    """The tokens of a reply, from the ``response_metadata`` of a call with logprobs."""
    content = (metadata.get("logprobs") or {}).get("content") or []
    return [
        Token(
            one["token"],
            one["logprob"],
            tuple((top["token"], top["logprob"]) for top in one["top_logprobs"]),
        )
        for one in content
    ]


def change(old: Sequence[Token], new: Sequence[Token]) -> float:
    """Largest distance of the logprobs of two replies, up to the first different token."""
    worst = 0.0
    for one, other in zip(old, new, strict=False):
        before, after = one.known(), other.known()
        gaps = [abs(after[text] - value) for text, value in before.items() if text in after]
        worst = max([worst, *gaps] if gaps else [math.inf])
        if one.text != other.text:
            break
    return worst


def surprise(tokens: Iterable[Token]) -> tuple[float, float]:
    """Tests whether tokens are sampled from the distribution of their logprobs.

    Given its prefix, a token's logprob has a known mean and variance under the distribution that it
    is sampled from. So the summed difference from the mean, over the root of the summed variance,
    is approximately standard normal (central limit theorem for martingales). A lower temperature,
    top_p or top_k give tokens that are too likely.

    `tokens` are of replies at temperature 1, with as many top logprobs as the server gives. All
    other tokens of a distribution count as one token, a nat less likely than the last of these.

    Returns:
        The test statistic in standard errors (positive: too likely), and the summed variance.
    """
    total, variance = 0.0, 0.0
    for token in tokens:
        values = sorted(value for _, value in token.top)
        other = values[0] - 1.0
        shares = [(math.exp(value), value) for value in values]
        shares.append((max(0.0, 1.0 - sum(share for share, _ in shares)), other))
        mass = sum(share for share, _ in shares)
        mean = sum(share * value for share, value in shares) / mass
        variance += sum(share * (value - mean) ** 2 for share, value in shares) / mass
        total += (token.logprob if token.logprob >= values[0] - 1e-6 else other) - mean
    return (total / math.sqrt(variance) if variance else 0.0), variance

"""The canary's checks: statistics, thresholds and advice. No I/O."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

#: Standard errors that chance exceeds in one run of 1.7 million (two-sided).
SIGMAS = 5.0
#: Standard errors by which the reward must have risen: by chance in one comparison of 30,000, so in
#: one canary of 1,200 that compares after each of 24 steps.
RISE = 4.0
#: Summed variance of logprobs below which replies are too certain for `surprise`.
LEAST_VARIANCE = 10.0
#: What to do if a check fails, by its name up to a comma.
ADVICE = {
    "error": "Read the server's words, and its log; nothing after this point was checked.",
    "captured": "The server does not record what it samples. See that calls reach this server and "
    "no proxy, that its disk is not full, and that nothing sets top_p, top_k or a grammar.",
    "sampler = learner": "Both engines must run the same weights, adapter version and tokenizer in "
    "the same precision, and the sampler must report logprobs of what it draws from (vLLM: "
    "--logprobs-mode processed_logprobs). Do not train before this holds.",
    "drawn as reported": "Tokens do not come from the distribution that their logprobs say: look "
    "for a default temperature, top_p or top_k (vLLM reads the model's generation_config.json "
    "unless --generation-config vllm is given).",
    "adapter changes replies": "What is trained is not what is served: see that the sampler loads "
    "adapters for this model's layers, and that its cache is told apart by adapter.",
    "base stays as it was": "Training or adapters leak into the base model or into other versions: "
    "nothing that this server answers can be relied upon.",
    "bare name serves the new version": "The server keeps routing to an old version; see "
    "`langchain-art checkpoints list` and the server's log.",
    "learns": "All else holds, but the reward does not rise: try twice the `--steps`, and a larger "
    "or smaller `--learning-rate`, before suspecting the learner.",
}


class Check(BaseModel):
    """One condition that must hold before training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """What was checked: ``captured``, ``sampler = learner`` …"""
    passed: bool
    measured: str
    bar: str
    value: float | None = None
    """The measured number, if it is one."""
    advice: str = ""
    """What to do; empty if it passed."""


class CanaryReport(BaseModel):
    """All checks of one canary, and the server's description."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """What the canary left behind on the server."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Of the last training step."""

    @property
    def passed(self) -> bool:
        """Whether the server can be trusted with a real run."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Token:
    """A sampled token as the server reported it: its logprob, and the most likely ones there."""

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
    """Largest distance of the logprobs of two replies, up to the first different token.

    Example: the same reply twice gives 0.0.
    """
    worst = 0.0
    for one, other in zip(old, new, strict=False):
        before, after = one.known(), other.known()
        gaps = [abs(after[text] - value) for text, value in before.items() if text in after]
        worst = max([worst, *gaps] if gaps else [math.inf])
        if one.text != other.text:
            break
    return worst


def surprise(tokens: Iterable[Token]) -> tuple[float, float]:
    """Whether tokens are drawn from the distribution of their logprobs, in standard errors.

    Given its prefix, a token's logprob has a known mean and variance under the distribution that it
    is drawn from. So the summed difference from the mean, over the root of the summed variance, is
    approximately standard normal (central limit theorem for martingales). A lower temperature, or a
    top_p or top_k, gives tokens that are too likely.

    Only the most likely tokens of a distribution are known; all others count as one token, a nat
    less likely than the last of these.

    Args:
        tokens: of replies at temperature 1, with as many top logprobs as the server gives.

    Returns:
        Standard errors (positive: too likely), and the variance over all tokens.
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


def rise(before: Sequence[float], after: Sequence[float]) -> float:
    """Standard errors by which the mean rose (Welch's statistic); 0.0 without any spread.

    Args:
        before: rewards of the first version, at least two.
        after: of the last version, at least two.
    """
    difference = statistics.fmean(after) - statistics.fmean(before)
    error = statistics.variance(before) / len(before) + statistics.variance(after) / len(after)
    if error:
        return difference / math.sqrt(error)
    return math.copysign(math.inf, difference) if difference else 0.0

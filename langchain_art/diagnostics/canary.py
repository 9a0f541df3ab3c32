"""The canary: a short toy training run that checks a server before a real run.

It captures calls, scores them, trains on them, and samples from the new version, as a fit does. The
reward prefers short replies, which any model learns within a few steps. If the reward does not
rise, the server is broken, and the earlier checks locate the fault.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from openai import OpenAIError
from pydantic import Field, SecretStr

from langchain_art import wire
from langchain_art.chat_models.chat_art import ChatART
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ArtError, ConfigError
from langchain_art.statistics.intervals import welch
from langchain_art.tracing.scope import capture
from langchain_art.wire import Wire
from langchain_art.wire.policies import logprob_tolerance

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


#: The canary's own policy, the same in every run.
POLICY = "langchain-art-canary"
PROMPTS = ("Say hello.", "Name a city.", "What is in the mail?", "Tell me about the weather.")
MAX_TOKENS = 16
#: Most likely tokens requested at each position: the maximum of OpenAI's API.
TOP = 20
WORKERS = 32
#: By which the toy run learns faster than a fit, whose policy is to be kept. Measured at 0.05 and
#: 0.2 million parameters only.
RATE_FACTOR = 4.0
#: Fewest steps of the toy run.
LEAST_STEPS = 4


def run_canary(
    server: ArtClient | str | None = None,
    *,
    steps: int = 24,
    group_size: int = 16,
    learning_rate: float | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> CanaryReport:
    """Train a toy policy on a server, and check the conditions of a fit.

    Two things that the API cannot delete stay on the server: version 0 of the policy `POLICY`,
    which equals the base model, and the records of the canary's calls and runs. A part that ends in
    an error is a failed check with the server's message, and the report ends with it.

    Args:
        server: a client, or a URL as `ArtClient` takes it. None: ``ART_BASE_URL``.
        steps: most training steps, at least `LEAST_STEPS`; the run ends when the reward has risen.
        group_size: runs of each of the four prompts in a step, at least 2.
        learning_rate: None: `RATE_FACTOR` times `wire.default_learning_rate`, at most 3e-2: by the
            model's size, and the scale of an adapter with the defaults of `LoraConfig`.
        on_progress: called before each part, at most `steps` + 3 of them, with what comes next.

    Raises:
        ConfigError: `steps` or `group_size` is too small.
        ServerUnreachable: the server does not answer.
    """
    if steps < LEAST_STEPS or group_size < 2:
        raise ConfigError(f"got {steps=}, {group_size=}, expected at least {LEAST_STEPS} and 2")
    client = server if isinstance(server, ArtClient) else ArtClient(server)
    try:
        status = client.status()
        default = wire.default_learning_rate(status.parameters, wire.LoraConfig())
        rate = learning_rate or min(3e-2, RATE_FACTOR * default)
        config = wire.TrainConfig(learning_rate=rate, optimizer_steps=2, advantage="standardized")
        return _Canary(client, status, config, steps, group_size, on_progress).run()
    finally:
        if client is not server:
            client.close()


class _Run(NamedTuple):
    trajectory: wire.Trajectory
    reward: float
    tokens: list[Token]
    model: str


@dataclass
class _Canary:
    client: ArtClient
    status: wire.ServerStatus
    config: wire.TrainConfig
    steps: int
    group_size: int
    report: Callable[[str], None]
    checks: list[Check] = field(default_factory=list[Check])
    results: list[wire.TrainResult] = field(default_factory=list[wire.TrainResult])
    runs: list[list[_Run]] = field(default_factory=list[list[_Run]])
    probes: dict[str, list[Token]] = field(default_factory=dict[str, list[Token]])

    def __post_init__(self) -> None:
        self.bar = logprob_tolerance(self.status.dtype)

    def run(self) -> CanaryReport:
        begun = time.monotonic()
        parts = {
            "prepares a policy": self._prepare,
            "samples and records": self._sample_first,
            "trains": self._train,
            "serves what was trained": self._compare,
        }
        for part, work in parts.items():
            try:
                work()
            except (ArtError, OpenAIError) as error:
                self._check(part, False, str(error), "no error")
                break
        described = {"base_model", "dtype", "device", "sampler", "learner"}
        return CanaryReport(
            **self.status.model_dump(include=described),
            base_url=self.client.base_url,
            policy=POLICY,
            checks=tuple(self.checks),
            left=self._leave(),
            metrics=self.results[-1].metrics if self.results else {},
            seconds=time.monotonic() - begun,
        )

    def _prepare(self) -> None:
        self.report("the policy, and what it and the base model say before")
        self.client.create_policy(POLICY)
        self.client.rollback(POLICY, 0)
        self.probes = {name: self._probe(name) for name in (self.status.base_model, f"{POLICY}@0")}

    def _sample_first(self) -> None:
        self.report("first replies")
        self.runs.append(self._rollouts())
        calls = [run.trajectory.turns[0].call_id for run in self.runs[0]]
        whole, count = sum(map(self._is_recorded, calls)), len(calls)
        measured = f"{whole} of {count} calls with token ids and logprobs, trainable"
        self._check("captured", whole == count, measured, f"{count}", whole)

    def _is_recorded(self, call_id: str | None) -> bool:
        if call_id is None:
            return False
        record = self.client.call(call_id)
        ids, logprobs = record["token_ids"], record["logprobs"]
        numbers = all(isinstance(p, float | int) and math.isfinite(p) for p in logprobs)
        return 0 < len(ids) == len(logprobs) and numbers and bool(record["trainable"])

    def _risen(self) -> float:
        rewards = ([run.reward for run in runs] for runs in (self.runs[0], self.runs[-1]))
        first, last = (
            (statistics.fmean(some), statistics.variance(some), len(some)) for some in rewards
        )
        return welch(first, last)

    def _train(self) -> None:
        for step in range(1, self.steps + 1):
            self.report(f"step {step} of {self.steps}")
            self.results.append(self._step(self.runs[-1]))
            if step == 1:
                self._check_gap("sampler = learner, first step", self.results)
            self.runs.append(self._rollouts())
            if step >= LEAST_STEPS and self._risen() >= RISE:
                break
        self._check_gap("sampler = learner, later steps", self.results[1:])
        sigmas, variance = surprise(t for runs in self.runs for run in runs for t in run.tokens)
        certain = variance < LEAST_VARIANCE
        measured = "replies too certain to tell" if certain else f"{sigmas:+.1f} standard errors"
        passed = certain or abs(sigmas) <= SIGMAS
        self._check("drawn as reported", passed, measured, f"within {SIGMAS:g}", sigmas)

    def _compare(self) -> None:
        self.report("what it and the base model say after")
        base, first, last = self.status.base_model, f"{POLICY}@0", self.results[-1].version
        after = {name: self._probe(name) for name in (base, first, f"{POLICY}@{last}", POLICY)}
        moved = change(after[first], after[f"{POLICY}@{last}"])
        over = f"more than {self.bar:g}"
        self._check("adapter changes replies", moved > self.bar, _nats(moved), over, moved)
        still = max(
            *(change(self.probes[name], after[name]) for name in self.probes),
            *(change(seen[base], seen[first]) for seen in (self.probes, after)),
        )
        self._check("base stays as it was", still <= self.bar, _nats(still), self._under(), still)
        served = {run.model for run in self.runs[-1]}
        far = change(after[POLICY], after[f"{POLICY}@{last}"])
        self._check(
            "bare name serves the new version",
            served == {f"{POLICY}@{last}"} and far <= self.bar and last > 0,
            f"{', '.join(sorted(served))}, {_nats(far)} from {POLICY}@{last}",
            f"{POLICY}@{last}, {self._under()}",
            far,
        )
        sigmas = self._risen()
        lengths = " → ".join(
            f"{abs(statistics.fmean(run.reward for run in runs)):.1f}"
            for runs in (self.runs[0], self.runs[-1])
        )
        measured = (
            f"{lengths} characters in {len(self.results)} steps, {sigmas:+.1f} standard errors"
        )
        self._check("learns", sigmas >= RISE, measured, f"at least {RISE:g} shorter", sigmas)

    def _leave(self) -> str:
        """Roll back to version 0 and delete the others; returns what is left on the server."""
        try:
            self.client.rollback(POLICY, 0)
            for checkpoint in self.client.checkpoints(POLICY):
                if checkpoint.version:
                    self.client.delete_checkpoint(POLICY, checkpoint.version)
        except ArtError as error:
            return f"the policy {POLICY} with its versions, which could not be erased: {error}"
        return f"{POLICY}@0, which equals the base model, and the records of the canary's calls"

    def _model(self, name: str, seed: int | None = None) -> ChatART:
        return ChatART(
            model=name,
            base_url=self.client.base_url,
            api_key=SecretStr(self.client.api_key or "EMPTY"),
            temperature=1.0,
            max_tokens=MAX_TOKENS,
            logprobs=True,
            top_logprobs=TOP,
            seed=seed,
        )

    def _probe(self, name: str) -> list[Token]:
        return tokens_of(self._model(name, seed=0).invoke(PROMPTS[0]).response_metadata)

    def _rollouts(self) -> list[_Run]:
        """A run of each prompt `group_size` times, all at once; shorter replies are better."""
        prompts = [prompt for prompt in PROMPTS for _ in range(self.group_size)]
        seeds = itertools.count(len(self.runs) * len(prompts))

        def one(prompt: str, seed: int) -> _Run:
            with capture(scenario=prompt) as run:
                reply = self._model(POLICY, seed).invoke(prompt)
                run.reward = reward = -float(len(reply.text))
            about = reply.response_metadata
            return _Run(run.trajectory(), reward, tokens_of(about), about["model_name"])

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(one, prompts, seeds))

    def _step(self, runs: Sequence[_Run]) -> wire.TrainResult:
        groups = [
            wire.TrajectoryGroup(
                id=f"canary-{uuid.uuid4().hex}",
                trajectories=tuple(one.trajectory for one in runs[start : start + self.group_size]),
            )
            for start in range(0, len(runs), self.group_size)
        ]
        return self.client.wait(self.client.train(groups, POLICY, self.config))

    def _check(
        self, name: str, passed: bool, measured: str, bar: str, value: float = math.nan
    ) -> None:
        finite = value if math.isfinite(value) else None
        advice = "" if passed else ADVICE.get(name.partition(",")[0], ADVICE["error"])
        self.checks.append(
            Check(name=name, passed=passed, measured=measured, bar=bar, value=finite, advice=advice)
        )

    def _check_gap(self, name: str, results: Sequence[wire.TrainResult]) -> None:
        trained = [r.metrics for r in results if "logprob_gap_mean" in r.metrics]
        gap = max((metrics["logprob_gap_mean"] for metrics in trained), default=math.inf)
        measured = f"nothing was trained: {dict(results[-1].excluded)}"
        if trained:
            measured = f"{_nats(gap)} per token, mean ratio {trained[0]['importance_mean']:.6f}"
        self._check(name, gap <= self.bar, measured, self._under(), gap)

    def _under(self) -> str:
        return f"at most {self.bar:g} in {self.status.dtype}"


def _nats(value: float) -> str:
    return f"{value:.2g} nats" if math.isfinite(value) else "other tokens altogether"

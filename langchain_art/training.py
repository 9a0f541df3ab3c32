"""`Trainer`: gather, judge, train, evaluate, report; and go on after a crash where it stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from langchain_art.client import ArtClient, AsyncArtClient
from langchain_art.errors import ConfigError
from langchain_art.evaluation import evaluate
from langchain_art.fitting import Fit, Plan, Schedule
from langchain_art.history import EvalResult, FitResult, History
from langchain_art.judging import Evaluator
from langchain_art.progress import Display
from langchain_art.report import summary_table
from langchain_art.rollout import Rollout
from langchain_art.wire import LoraConfig, TrainConfig

if TYPE_CHECKING:
    from langchain_art.chat_models import ChatART

T = TypeVar("T")

#: Seconds that a fit waits for a server that restarts, before it stops (and can be resumed).
PATIENCE = 300.0


class Trainer:
    """Improves one policy by reinforcement learning on the rewards of rollouts.

    Example::

        trainer = Trainer(ChatART(model="email-agent"), group_size=8)
        result = await trainer.fit(rollout, train_scenarios, steps=50, eval_scenarios=held_out)
        print(result.before, result.after, result.adapter)

    Args:
        model: the `ChatART` that the graph uses: its name is the policy's, its server the
            trainer's. Or a policy's name; then the server is `client`'s or ART_BASE_URL's.
        evaluator: scores each group (see `judging.Evaluator`). None: rollouts bring their rewards.
            A group for which it raises is left out and counted as ``groups.unjudged``. In an
            evaluation, runs that bring a reward keep it and only the others are judged.
        group_size: runs per scenario and step, at least 2: advantages compare runs of a group.
        groups_per_step: scenarios per step, drawn in shuffled epochs.
        concurrency: most rollouts at once.
        config: of the optimizer step. None: the defaults of `TrainConfig`.
        out_dir: holds ``history.jsonl`` and what a resumed fit needs.
        client: whose server and key to use, instead of the model's.
        seed: of the order of the scenarios.
        lora: shape of the policy's adapter if it is made now. None: an existing policy as it is,
            or the defaults of `LoraConfig`.
        max_failed: fraction of a batch's rollouts that may raise before the fit ends.
        console: where progress goes. None: standard output.

    Raises:
        ConfigError: the numbers make no sense, or `model` says nothing about a policy.
    """

    def __init__(
        self,
        model: ChatART | str,
        *,
        evaluator: Evaluator | None = None,
        group_size: int = 8,
        groups_per_step: int = 16,
        concurrency: int = 64,
        config: TrainConfig | None = None,
        out_dir: str | Path = "out/train",
        client: ArtClient | AsyncArtClient | None = None,
        seed: int = 0,
        lora: LoraConfig | None = None,
        max_failed: float = 0.5,
        console: Console | None = None,
    ) -> None:
        if group_size < 2 or groups_per_step < 1 or concurrency < 1:
            raise ConfigError(
                f"got {group_size=}, {groups_per_step=}, {concurrency=}, expected at least 2, 1, 1"
            )
        self.policy, self._base_url, self._api_key = _address(model, client)
        self.out_dir = Path(out_dir)
        self._plan = Plan(
            policy=self.policy,
            evaluator=evaluator,
            group_size=group_size,
            groups_per_step=groups_per_step,
            concurrency=concurrency,
            config=config or TrainConfig(),
            seed=seed,
            lora=lora,
            max_failed=max_failed,
        )
        self._display = Display(console)

    async def fit(
        self,
        rollout: Rollout,
        train_scenarios: Sequence[Any],
        *,
        steps: int,
        eval_scenarios: Sequence[Any] | None = None,
        eval_every: int | None = None,
        eval_samples: int = 1,
        resume: bool = True,
    ) -> FitResult:
        """Train for `steps` steps in all, those of a resumed fit included.

        All scored groups are sent, those without variance too: what is left out of training is the
        server's to say, in ``dropped``. Stop it with Ctrl-C or let it crash: the same call goes on.

        Args:
            rollout: see `rollout.Rollout`.
            train_scenarios: what to learn from.
            steps: one optimizer step (or ``config.updates``) and one version of the adapter each.
            eval_scenarios: held out; evaluated before, after, and every `eval_every` steps. The
                version with the best mean is pinned on the server.
            eval_every: steps. None: only before and after.
            eval_samples: runs per held-out scenario.
            resume: go on with the fit in `out_dir`. False: put its files aside and begin anew.

        Raises:
            RolloutFailed: more than `max_failed` of a batch raised.
            JobFailed: the server could not train; the adapter is unchanged.
            ServerUnreachable: it stayed away for five minutes.
            ConfigError: `out_dir` holds another fit, or no run has a reward.
        """
        if "@" in self.policy:
            raise ConfigError(
                f"got model {self.policy!r}, which is one version and never changes; train the "
                f"policy {self.policy.partition('@')[0]!r}"
            )
        if steps < 0 or (eval_every is not None and eval_every < 1) or eval_samples < 1:
            raise ConfigError(f"got {steps=}, {eval_every=}, {eval_samples=}, expected counts")
        history = History(self.out_dir, self.policy, self._plan.seed, resume=resume)
        schedule = Schedule(steps, eval_scenarios or (), eval_every, eval_samples)
        async with self._client() as client:
            fit = Fit(self._plan, client, history, self._display, rollout)
            try:
                result = await fit.run(train_scenarios, schedule)
            except (asyncio.CancelledError, KeyboardInterrupt):
                self._display.line(
                    f"Stopped after step {history.done} of {steps}. Run the same again to go on "
                    f"from there ({self.out_dir})."
                )
                raise
        self._display.console.print(summary_table(result))
        return result

    def fit_sync(
        self, rollout: Rollout, train_scenarios: Sequence[Any], **options: Any
    ) -> FitResult:
        """`fit` for programs without an event loop; takes the same options."""
        return _run_sync(self.fit(rollout, train_scenarios, **options), "fit")

    async def evaluate(
        self, rollout: Rollout, scenarios: Sequence[Any], *, samples: int = 1
    ) -> EvalResult:
        """Mean reward of `scenarios`, with its 95 % interval, on one version of the model.

        Raises:
            ArtError: the policy's version changed meanwhile; something else trains it.
            RolloutFailed: more than `max_failed` of the rollouts raised.
        """
        async with self._client() as client:
            await client.ready(PATIENCE)
            with self._display.bar("evaluating", len(scenarios) * samples) as advance:
                return await evaluate(
                    client,
                    self._plan.policy,
                    rollout,
                    scenarios,
                    samples=samples,
                    concurrency=self._plan.concurrency,
                    evaluator=self._plan.evaluator,
                    max_failed=self._plan.max_failed,
                    on_done=lambda _: advance(),
                )

    def evaluate_sync(
        self, rollout: Rollout, scenarios: Sequence[Any], *, samples: int = 1
    ) -> EvalResult:
        """`evaluate` for programs without an event loop."""
        return _run_sync(self.evaluate(rollout, scenarios, samples=samples), "evaluate")

    def _client(self) -> AsyncArtClient:
        # A new one for each event loop: connections cannot move between loops.
        return AsyncArtClient(self._base_url, self._api_key, patience=PATIENCE)


def _run_sync(work: Coroutine[Any, Any, T], name: str) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise ConfigError(f"An event loop runs here already; write `await trainer.{name}(...)`")


def _address(
    model: ChatART | str, client: ArtClient | AsyncArtClient | None
) -> tuple[str, str | None, str | None]:
    """Policy, base URL and key. A client's server goes before the model's."""
    policy: Any = model if isinstance(model, str) else getattr(model, "model_name", None)
    if not isinstance(policy, str) or not policy:
        raise ConfigError(f"got model {model!r:.200}, expected a ChatART or the name of a policy")
    if client is not None:
        return policy, client.base_url, client.api_key
    if isinstance(model, str):
        return policy, None, None
    key: Any = getattr(model, "openai_api_key", None)
    reveal: Callable[[], str] | None = getattr(key, "get_secret_value", None)
    return policy, getattr(model, "openai_api_base", None), reveal() if reveal else None

"""`Trainer`: rollouts, evaluation, training, and a report; a fit resumes after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from langchain_art._callables import run_sync
from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.conversations import Conversations, sft_config
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError, RolloutFailed
from langchain_art.evaluators.scoring import Evaluator, check_evaluator
from langchain_art.export.exporter import Exporter
from langchain_art.rollout.graph_rollout import check_inputs
from langchain_art.rollout.runner import Rollout
from langchain_art.rollout.scenarios import check_count
from langchain_art.trackers.choice import chosen_trackers
from langchain_art.trackers.tracker_thread import Tracker
from langchain_art.training import addresses, fit_settings
from langchain_art.training.advantages import AdvantageHook, check_hook
from langchain_art.training.fit_export import FitExport
from langchain_art.training.fit_loop import FitLoop, OnStep
from langchain_art.training.fit_state import History, alone
from langchain_art.training.identity import identity_of
from langchain_art.training.progress import Display
from langchain_art.training.records import EvalResult, FitResult
from langchain_art.training.report import all_alike
from langchain_art.training.run_setup import Setup
from langchain_art.training.warm_start import WarmStart, WarmStartRun, warm_version
from langchain_art.wire import LoraConfig, SFTConfig

#: Seconds that a fit waits for a server that answered before and restarts, before it raises.
PATIENCE = 300.0


class Trainer:
    """Improves a policy, or several of one graph, by reinforcement learning on runs' rewards.

    Example::

        trainer = Trainer(ChatART(model="email-agent"), group_size=8)
        result = await trainer.fit(rollout, train_scenarios, steps=50, eval_scenarios=held_out)
        print(result.before, result.after, result.adapter)

    Args:
        model: the `ChatART` that the graph uses, with the policy's name and server; or a policy's
            name (its server is `client`'s or ART_BASE_URL's). Or several, of one server: each step
            trains every policy on the same groups, each on the calls that it sampled.
        trainable: which calls learn, by the name of a node (or its path), a tag or a model:
            ``{"writer": True}`` for those alone, ``{"critic": False}`` for all others. None: all
            that the policies sampled. See `Turn.learns`.
        evaluator: scores each group (`evaluators.Evaluator`). None: rollouts bring their rewards.
            A group for which it raises is excluded and counted as ``groups.unjudged``. In an
            evaluation, runs that bring a reward keep it.
        group_size: runs per scenario and step, at least 2: advantages compare runs of a group.
        groups_per_step: scenarios per step, drawn in shuffled epochs. Few: many steps, each on runs
            of the newest version, learn more from as many runs.
        concurrency: most rollouts at once. None: all runs of a step; at least 64, which evaluations
            of small steps need, and at most 500.
        config: of the optimizer step, or a mapping from each policy to its own; one that has None
            there plays and does not learn. None: the defaults of `TrainConfig`.
        name: of the experiment, whose folder is ``out/<name>``; `langchain-art fits` compares them.
        out_dir: instead of a name: the folder that holds ``history.jsonl`` and what a resumed fit
            needs. None: ``out/train``.
        client: whose server and key to use, instead of the model's.
        seed: of the order of the scenarios, of each call's sampling and of ``run.rng``
            (`langchain_art.call_seeds`). The embedded engine then gives the same fit again, also
            to one that is resumed, but not with `max_steps_ahead`.
        lora: shape of the policy's adapter if it is made now. None: an existing policy as it is,
            or the defaults of `LoraConfig`.
        max_failed: fraction of a batch's rollouts that may raise before the fit ends.
        max_steps_ahead: bound of asynchronous rollouts, in steps. 0: a step's rollouts begin after
            the previous step is trained. More: rollouts continue while the server trains, and a
            step takes the groups that end first. Their calls may be a few versions old, for which
            the learner corrects (importance sampling, `TrainConfig.max_staleness`).
        dynamic_sampling_rounds: how often, at most, a step rolls out further scenarios in place
            of groups with zero variance or not judged (DAPO, arXiv 2503.14476, section 3.2), until
            `groups_per_step` have something to teach. 0: never. None: three times, only until half
            of them have, and only in place of groups whose runs all earned less than the step's
            best one and of which a call may be trained: what is solved is not replaced.
        advantages: a function of each group, in place of the server's advantages
            (`training.advantages.AdvantageHook`): a number for each run, call or token. None:
            `TrainConfig.advantage` and `TrainConfig.credit`.
        on_collapse: what a fit does when rewards fall by more than chance explains, below all
            before or with replies cut off, alike or flat (`training.collapse`).
            ``"rollback"``: the policies go back to the last good version with its state of Adam,
            and the fit goes on at a third of the learning rate; the discarded steps count as
            steps. After the fourth time it ends there. ``"stop"``: the fit ends with the versions
            as they are. ``"warn"``: it is only said.
        trackers: where the fit is shown beside its folder: ``["wandb", "tensorboard"]``, or objects
            (`trackers.Tracker`). None: W&B if WANDB_PROJECT or WANDB_MODE is set.
        export: where runs go for review when they are judged and trained. None: nowhere.
        workers: where rollouts run. None: in this process. ``"server"``: in processes of
            ``langchain-art worker`` on any machine, which lease them from the server; there
            `concurrency` is each worker's own. ``"ray"`` or `RayWorkers`: in such workers on a Ray
            cluster, which are there as long as the fit. Scenarios must be JSON values then.
        console: where progress goes. None: standard output.

    Raises:
        ConfigError: a number is out of range, `trainable` is not such a mapping, `name` is no name
            or comes with an `out_dir`, or `model` names no policy, names one twice, or is spread
            over several servers; a tracker is not known, or its package is not installed; or
            `export` is no Exporter.
    """

    def __init__(
        self,
        model: addresses.Model | Sequence[addresses.Model],
        *,
        trainable: Mapping[str, bool] | None = None,
        evaluator: Evaluator | None = None,
        group_size: int = 8,
        groups_per_step: int = 4,
        concurrency: int | None = None,
        config: fit_settings.Configs = None,
        name: str | None = None,
        out_dir: str | Path | None = None,
        client: ArtClient | AsyncArtClient | None = None,
        seed: int = 0,
        lora: LoraConfig | None = None,
        max_failed: float = 0.5,
        max_steps_ahead: int = 0,
        dynamic_sampling_rounds: int | None = None,
        advantages: AdvantageHook | None = None,
        on_collapse: fit_settings.OnCollapse = "rollback",
        trackers: Sequence[str | Tracker] | None = None,
        export: Exporter | None = None,
        workers: fit_settings.Workers | None = None,
        console: Console | None = None,
    ) -> None:
        self.policies, self._base_url, self._api_key = addresses.address_of(model, client)
        self._models = addresses.sampling_settings(model)
        self.out_dir = addresses.folder_of(name, out_dir)
        configs = fit_settings.check_configs(config, self.policies)
        self._plan = fit_settings.FitSettings(
            policies=self.policies,
            trainable=fit_settings.check_trainable(trainable),
            evaluator=None if evaluator is None else check_evaluator(evaluator),
            group_size=group_size,
            groups_per_step=groups_per_step,
            concurrency=concurrency,
            configs=configs,
            seed=seed,
            lora=fit_settings.check_kind("lora", lora, LoraConfig, "a LoraConfig"),
            max_failed=max_failed,
            max_steps_ahead=max_steps_ahead,
            dynamic_sampling_rounds=dynamic_sampling_rounds,
            advantages=check_hook(advantages, configs),
            on_collapse=on_collapse,
            export=fit_settings.check_kind(
                "export", export, Exporter, 'an Exporter, such as Exporter("otlp")'
            ),
            workers=workers,
        )
        self._trackers = chosen_trackers(trackers)
        self._display = Display(console)

    async def fit(
        self,
        rollout: Rollout | str,
        train_scenarios: Sequence[Any],
        *,
        steps: int,
        eval_scenarios: Sequence[Any] | None = None,
        eval_every: int | None = None,
        eval_samples: int = 1,
        stop_early: int | None = None,
        fresh: bool = False,
        on_step: OnStep | None = None,
    ) -> FitResult:
        """Train for `steps` steps in all, those of a resumed fit included.

        All scored groups are sent; the server excludes what cannot be trained and reports it in
        ``excluded``. After Ctrl-C or a crash, the same call resumes; when it is finished, the same
        call returns the stored result and runs nothing. A call with another config, rollout
        (its source and what it calls), evaluator, model, policy or other scenarios is another fit:
        it is refused in the same folder.

        Args:
            rollout: see `Rollout`. A graph brings no reward, so it needs an `evaluator`,
                unless `advantages` or ``config.distillation`` alone teaches and nothing is
                evaluated. With `workers` a function of a module, or the name by which workers run
                it.
            train_scenarios: what to learn from.
            steps: one version of the adapter each, of ``config.optimizer_steps`` optimizer steps.
            eval_scenarios: held out; evaluated before, after, and every `eval_every` steps. The
                versions with the best mean are pinned on the server, as are the latest.
            eval_every: steps. None: only before and after.
            eval_samples: runs per held-out scenario.
            stop_early: end after so many evaluations in a row without a gain, which is a mean above
                the last gain's by more than the 95 % interval of the difference. None: never.
            fresh: begin anew from the base: once a run of `rollout` has worked, the policies are
                rolled back to version 0 (or to where this folder's warm start had come), and the
                files of a fit in the folder are moved to ``earlier/``. Versions that were made stay
                on the server as it keeps them; those that the former fit pinned, until this one
                pins its own.
            on_step: called with the record of each step once it is on disk, before the evaluation
                after it; may be async. What it raises ends the fit, which can be resumed.

        Raises:
            RolloutFailed: more than `max_failed` of a batch raised.
            JobFailed: the server could not train; the adapter is unchanged. Policies that were
                trained before it in the step keep their version; resumed, the step is repeated.
            ServerUnreachable: the server never answered (for ten seconds), or it did and then did
                not for five minutes.
            ConfigError: `out_dir` holds another fit or one that runs, no run has a reward (without
                `advantages`), a name in `trainable` is no call's, scenarios are a text, or one is
                no input for the graph.
        """
        addresses.trained_policies(self.policies)
        plan, held_out = self._plan, () if eval_scenarios is None else eval_scenarios
        fit_settings.check_scope(plan, rollout, train_scenarios, held_out, steps)
        if on_step is not None and not callable(on_step):
            raise ConfigError(f"got {on_step=!r:.200}, expected a function of a step's record")
        held_out = list(held_out)  # an array has no truth value
        schedule = fit_settings.Schedule(steps, held_out, eval_every, eval_samples, stop_early)
        identity = identity_of(plan, self._models, rollout, train_scenarios, held_out)
        with alone(self.out_dir):
            async with self._setup(rollout) as setup, AsyncExitStack() as stack:
                client = setup.client
                if fresh:
                    await client.ready()
                    await addresses.check_server(client, plan.policies, plan.configs)
                    for some in (train_scenarios, held_out):
                        check_inputs(rollout, some)
                    await stack.enter_async_context(setup.workers())

                    async def try_it() -> None:
                        for name in plan.policies:
                            await addresses.serving_version(client, name, plan.lora, self._display)
                        try:
                            some = train_scenarios if len(train_scenarios) else held_out
                            await setup.try_out(some)
                        except RolloutFailed as error:
                            raise RolloutFailed(f"{error} Nothing was rolled back.") from error

                    bases = warm_version(self.out_dir)
                    await addresses.roll_back(
                        client, plan.learning, self._display, bases, before=try_it
                    )
                history = History(self.out_dir, identity, fresh=fresh)
                if why := history.why_finished(steps):
                    self._display.line(why)
                    result = history.result(history.state, history.versions)
                    self._display.summary(result)
                    return result
                fit = FitLoop(setup, history, schedule, on_step, self._trackers, fresh)
                try:
                    if not fresh:
                        await stack.enter_async_context(setup.workers())
                    result = await fit.run(train_scenarios)
                except (asyncio.CancelledError, KeyboardInterrupt) as error:
                    self._display.stopped(
                        error,
                        f"Stopped after step {history.done} of {steps}. Run the same again to go "
                        f"on from there ({self.out_dir})"
                        + (", without fresh=True." if fresh else "."),
                    )
                    raise
        self._display.summary(result)
        return result

    def fit_sync(
        self, rollout: Rollout | str, train_scenarios: Sequence[Any], **options: Any
    ) -> FitResult:
        """`fit` for programs without an event loop; takes the same options."""
        return run_sync(self.fit(rollout, train_scenarios, **options), "trainer.fit")

    async def warm_start(
        self,
        conversations: Conversations,
        *,
        epochs: int = 1,
        batch_size: int = 16,
        config: SFTConfig | None = None,
        fresh: bool = False,
    ) -> WarmStart:
        """Supervised steps on conversations, before `fit`.

        Each step is a job and makes a version. A `fit` that follows begins with an optimizer and a
        learning rate's schedule of its own. After Ctrl-C or a crash, the same call resumes.

        Args:
            conversations: runs, ids of runs that the server has, conversations in OpenAI's or
                LangChain's messages, or the Path of a JSONL file (`conversations.Conversation`).
            epochs: how often each is learned.
            batch_size: conversations of one step.
            config: of each step. None: the defaults of `SFTConfig`.
            fresh: begin anew: the policy is rolled back to version 0, and the file of a warm start
                in `out_dir` is moved to ``earlier/``.

        Raises:
            ConfigError: a number is below 1, a conversation is malformed, `config` is no SFTConfig,
                `out_dir` holds another warm start or one that had come further than what serves,
                or the trainer has several policies.
            JobFailed: the server could not train: a conversation cannot be shown to its model, say.
            ServerUnreachable: the server never answered (for ten seconds), or it did and then did
                not for five minutes.
        """
        addresses.trained_policies(self.policies)
        run = WarmStartRun(
            self.out_dir,
            self.policy,
            conversations,
            sft_config(config),
            epochs=epochs,
            batch_size=batch_size,
            seed=self._plan.seed,
            fresh=fresh,
        )
        async with self._client() as client:
            await client.ready()
            if fresh:
                await addresses.roll_back(client, self.policies, self._display, {})
            known = (client, self.policy, self._plan.lora, self._display)
            serving = await addresses.serving_version(*known)
            return await run.run(client, self._display, serving)

    def warm_start_sync(self, conversations: Conversations, **options: Any) -> WarmStart:
        """`warm_start` for programs without an event loop; takes the same options."""
        return run_sync(self.warm_start(conversations, **options), "trainer.warm_start")

    async def evaluate(
        self, rollout: Rollout | str, scenarios: Sequence[Any], *, samples: int = 1
    ) -> EvalResult:
        """Mean reward of `scenarios`, with its 95 % interval, on one version of each model.

        Raises:
            ArtError: a policy's version changed during the evaluation.
            ConfigError: `rollout` is a graph as it is, and there is no `evaluator`; or `scenarios`
                are a text.
            RolloutFailed: more than `max_failed` of the rollouts raised.
        """
        fit_settings.check_reward(rollout, self._plan.evaluator)
        fit_settings.check_workers(self._plan, rollout, scenarios=scenarios)
        samples = check_count(samples, "samples", 1)
        async with self._setup(rollout) as setup:
            await setup.client.ready()
            async with setup.workers():
                found = await setup.evaluate(scenarios, samples=samples)
        alike = all_alike(found.scenarios.values(), found.n)
        if alike and all(version.endswith("@0") for version in found.versions):
            self._display.warn(alike)
        return found

    def evaluate_sync(
        self, rollout: Rollout | str, scenarios: Sequence[Any], *, samples: int = 1
    ) -> EvalResult:
        """`evaluate` for programs without an event loop."""
        return run_sync(self.evaluate(rollout, scenarios, samples=samples), "trainer.evaluate")

    @property
    def policy(self) -> str:
        """The single policy's name. Raises ConfigError if there are several: see `policies`."""
        if len(self.policies) != 1:
            raise ConfigError(f"This trainer has several policies: {', '.join(self.policies)}")
        return self.policies[0]

    @asynccontextmanager
    async def _setup(self, rollout: Rollout | str) -> AsyncGenerator[Setup, None]:
        plan, display = self._plan, self._display
        export = plan.export and FitExport(plan.export, plan, self.out_dir, display)
        with closing(export) if export else nullcontext():
            async with self._client() as client:
                yield Setup(plan, client, display, rollout, export)

    def _client(self) -> AsyncArtClient:
        # One per event loop: connections cannot move between loops.
        return AsyncArtClient(
            self._base_url, self._api_key, patience=PATIENCE, on_wait=self._display.line
        )

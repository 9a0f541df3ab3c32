"""A training job: request, state, events, result and what it excluded; and the audit of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from langchain_art._notebook import view_html
from langchain_art.wire.choices import MAX_COUNT
from langchain_art.wire.identifiers import Finite, Id, Name, RewardValue, Several, Wire
from langchain_art.wire.train_config import JobConfig, PreferenceConfig, TrainConfig
from langchain_art.wire.trajectories import Status

_MEANING = {
    "groups.zero_variance": "all runs of a group have the same reward, so none is better",
    "groups.single": "only one run of a group has a reward, so there is nothing to compare",
    "groups.empty": "no run of a group has a reward and a call that learns",
    "groups.stale": "a call of it was sampled by a version older than max_staleness allows",
    "groups.rolled_back": "a version sampled a call of it that a rollback has discarded since",
    "groups.unjudged": "the evaluator raised",
    "groups.incomplete_pair": "a side of a pair has no token that may be trained, or lacks a reply",
    "groups.equal_pair": "both sides of a pair have the same tokens, so none is better",
    "runs.unscored": "the run has no reward: set run.reward, 0.0 is one",
    "runs.truncated": "the graph was cut off at its recursion limit (mask_truncated)",
    "runs.without_trainable_calls": "the policy sampled no call of it that may be trained",
    "runs.failed": "the rollout raised and had set no reward",
    "runs.without_advantage": "your advantages leave it out",
    "runs.already_trained": "trained on before",
    "calls.already_trained": "trained before, in another run",
    "calls.repeated": "one reply used twice; its first use is trained",
    "calls.frozen": "trainable= does not choose it",
    "calls.other_policy": "sampled by another model than the one that is trained",
    "calls.foreign": "sampled elsewhere, or by a client that drops the ids of calls",
    "calls.lost": "the server has no tokens of it",
    "calls.empty": "nothing was sampled",
    "calls.too_long": "more tokens than the model takes: a larger max_model_len on the server",
    "calls.greedy_decoding": "sampled at temperature 0: set temperature=1 in training",
    "calls.no_choice": "top_k, top_p, a low temperature or a grammar left one token each time",
    "calls.truncated_sampling": "sampled with top_p or top_k, and what these kept is not known",
    "calls.grammar": "a grammar shaped it, and what it allowed is not known",
    "calls.truncated": "cut off at max_tokens (mask_truncated)",
    "calls.single": "no other run of its group has a call to compare it with",
    "calls.unscored": "credit by call: neither it nor its run has a reward",
    "calls.without_advantage": "your advantages leave it out",
    "calls.zero_variance": "the calls that it is compared with fared alike",
    "calls.superseded": "the graph threw it away",
    "calls.superseded_retried": "the graph threw it away: a later attempt took its place",
    "calls.superseded_interrupted": "the graph threw it away: its node was interrupted",
    "calls.superseded_error": "the graph threw it away: the call, or its node, raised",
    "calls.superseded_unchosen": "the graph threw it away: of several choices it took another",
}


def meaning(reason: str) -> str:
    """A reason in words: ``calls.greedy_decoding``, or a call's own ``greedy_decoding``."""
    known = reason if "." in reason else f"calls.{reason}"
    if known.startswith("calls.superseded"):  # a client may give reasons of its own
        return _MEANING.get(known, _MEANING["calls.superseded"])
    return _MEANING.get(known, "see docs/troubleshooting.md, or a newer release's")


#: Of a call: for all of its sampled tokens, or for each of them.
CallAdvantage = RewardValue | Several[RewardValue]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
#: States of a job that has not ended.
OPEN_STATES: tuple[JobState, ...] = ("queued", "running")


def settings_of_rewards(config: TrainConfig) -> str:
    """Names of settings that turn rewards into advantages and are not left at their defaults."""
    found = config.reward_settings
    return ", ".join(found if config.reads_rewards else [*found, "distillation.rewards"])


class StepSeconds(Wire):
    """Seconds that the client took for a step's batch; kept with the job's metrics, to be shown."""

    rollout: Finite = Field(ge=0)
    """Seconds of the runs: ``rollout_seconds`` in `TrainResult.metrics`."""
    judge: Finite = Field(default=0.0, ge=0)
    """Seconds of the evaluator: ``judge_seconds``."""


class TrainRequest(Wire):
    """Body of ``POST /v1/train``, beside the header ``Idempotency-Key``."""

    policy: Name
    groups: Several[Several[Id]] = Field(min_length=1, max_length=4096)
    """Ids of trajectories that the server has, group by group. Of a preference step, each group is
    a pair: the chosen run and the rejected one."""
    config: JobConfig = TrainConfig()
    trainable: dict[str, bool] = Field(default_factory=dict, max_length=256)
    """Calls that are trained, by name (`Turn.learns`); empty: all that the policy sampled."""
    rewards: dict[Id, RewardValue] = Field(default_factory=dict)
    """Trajectory's id -> its reward for this job alone, such as what people say of it. The rewards
    that the run and its calls have do not count then, and stay as they are."""
    turns: dict[str, RewardValue] = Field(default_factory=dict)
    """Call's id -> the reward of that call for this job alone (`Turn.reward`). Of a run with such a
    call, no other rewards count than those in `turns` and `rewards`."""
    compared: Several[dict[str, Several[RewardValue]]] = ()
    """Rewards, by group, that those of its runs (key ``""``) and of its calls (key: their node, as
    in `TrainResult.nodes`) are compared with, of runs that this job does not train. Read with
    ``credit="call"``."""
    advantages: dict[Id, Several[CallAdvantage | None]] | None = None
    """Trajectory's id -> for each of its turns, in order, the advantage that its tokens get in
    place of one that `config` computes: a number, a number for each sampled token, or None (not
    trained). A run that is not named is not trained (``runs.without_advantage``). None: `config`
    computes all."""
    retrain: bool = False
    """Train also what earlier jobs of this policy trained: another pass over the same tokens. Else
    each run and each call is trained once on the way to a version (what a rollback has discarded
    does not count); what is left out is counted in `TrainResult.excluded`
    as ``runs.already_trained`` and ``calls.already_trained``. Supervised steps do not count."""
    schedule_step: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The step, from 1, at which the learning rate's schedule is read: the number of the step in
    its fit. None: how many steps the new version is away from the base."""
    seconds: StepSeconds | None = None
    """Seconds that the batch took; the same request with other seconds is the same request."""

    @property
    def reference(self) -> tuple[str, int]:
        """The policy and version that the step measures from; 0: the base model, or nothing."""
        if isinstance(self.config, TrainConfig):
            if self.config.distillation is not None:
                return self.config.distillation.version
            if self.config.kl is not None:
                return self.policy, self.config.kl.reference or 0
        return self.policy, 0

    @model_validator(mode="after")
    def _fits_its_step(self) -> TrainRequest:
        config = self.config
        if self.retrain and not isinstance(config, TrainConfig):
            raise ValueError(
                f"got retrain=true for a step of the kind {config.kind!r}, which needs none; "
                "leave it out"
            )
        reads = isinstance(config, TrainConfig) and config.credit.kind == "call"
        if self.compared and (len(self.compared) != len(self.groups) or not reads):
            raise ValueError(
                f"got {len(self.compared)} entries of `compared` for {len(self.groups)} groups of "
                f"a step of the kind {config.kind!r}, expected one for each group of a TrainConfig "
                "with credit='call'"
            )
        for index, group in enumerate(self.groups if isinstance(config, PreferenceConfig) else ()):
            if len(group) != 2 or group[0] == group[1]:
                raise ValueError(
                    f"groups[{index}] has the runs {list(group)[:5]}, expected two for a "
                    "preference step: the chosen one and the rejected one"
                )
        return self

    @model_validator(mode="after")
    def _values_count(self) -> TrainRequest:
        config, own = self.config, self.rewards or self.turns
        if own and (not isinstance(config, TrainConfig) or config.scores):
            raise ValueError(
                "got rewards for a step that reads none, expected a TrainConfig without scores"
            )
        if self.advantages is not None:
            if not isinstance(config, TrainConfig) or own or self.compared:
                raise ValueError(
                    "got advantages for a step that reads none, or with rewards of its own, "
                    "expected a TrainConfig and neither `rewards`, `turns` nor `compared`"
                )
            if unread := settings_of_rewards(config):
                raise ValueError(f"got advantages together with {unread}, which would not be read")
        known = {one for group in self.groups for one in group}
        for name, given in (("rewards", self.rewards), ("advantages", self.advantages or {})):
            if unknown := sorted(set(given) - known)[:5]:
                raise ValueError(f"got {name} for {unknown}, expected runs of `groups`")
        return self


class NodeReport(Wire):
    """One node's part of a step."""

    calls: int
    """Calls that were trained."""
    tokens: int
    """Sampled tokens that were trained."""
    advantage_mean: float
    """Mean over its trained tokens; 0.0 without any."""
    advantage_abs: float
    """Mean absolute advantage over its trained tokens."""
    excluded: dict[str, int]
    """reason -> calls of this node that were not trained."""


class TrainResult(Wire):
    """The result of one job, with counts of what was excluded, by reason."""

    policy: Name
    version: int
    """The version that is served now. Equal to the job's base version if nothing was trainable."""
    metrics: dict[str, float]
    excluded: dict[str, int]
    """reason -> count, in the unit that the reason names: ``groups.…``, ``runs.…``, ``calls.…``."""
    nodes: dict[str, NodeReport] = Field(default_factory=dict)
    """Report by path (``team/writer``), else node; ``-`` for calls outside of any graph."""


class TurnAudit(Wire):
    """Report on one turn: if it is, or was, trained, and why not."""

    call_id: str | None
    node: str | None
    path: Several[str]
    model: str | None
    """``email-agent@17``: the version that sampled it."""
    prompt_tokens: int
    sampled_tokens: int
    trained_tokens: int
    """Trained ones of `sampled_tokens`; each token of a run is trained by one turn."""
    excluded_because: str | None
    """Reason why none is trained; None if they are."""
    prefix: Literal["starts", "extends", "forks"] | None
    """Relation to earlier turns: its prompt shares no token with them (``starts``), begins with all
    of one's prompt and reply (``extends``), or with a part of them (``forks``). None: tokens lost.
    """
    prefix_turn: int | None
    """Index of the turn that it extends or forks from."""
    prefix_tokens: int
    """Tokens that it shares with that turn."""

    @property
    def label(self) -> str:
        """As `Turn.label`."""
        return "/".join(self.path) or self.node or "-"


class TrajectoryAudit(Wire):
    """``GET /v1/trajectories/{id}/audit``: a run's trained tokens, and why the rest is excluded."""

    trajectory: Id
    status: Status
    reward: Finite | None
    """`Trajectory.total_return`: the run's reward and its calls'; None: it has neither."""
    turns: Several[TurnAudit]
    rows: int
    """Sequences of the learner into which the run is packed."""
    trained_by: dict[str, str]
    """policy -> the last job that trained the run; empty if none did."""

    def _repr_html_(self) -> str:
        return view_html("cli.tables:audit_table", self)

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of all turns."""
        return sum(turn.trained_tokens for turn in self.turns)


class TrainJob(Wire):
    """A durable job: it survives a crash and trains exactly once."""

    id: str
    key: str
    policy: Name
    state: JobState
    base_version: int | None = None
    result: TrainResult | None = None
    error: str | None = None
    attempts: int = 0
    """Number of times that it was begun; a restart of the server goes on with the same attempt."""
    retryable: bool = False
    """It failed for a reason that may pass (no space, an engine's death): the same request with the
    same Idempotency-Key queues it again."""
    created_at: float
    finished_at: float | None = None

    @property
    def ended(self) -> bool:
        """True if it neither waits nor runs."""
        return self.state not in OPEN_STATES


class JobEvent(Wire):
    """One line of a job's log, in order of `seq`."""

    seq: int
    at: float
    message: str
    progress: float | None = None
    """0 to 1, where it is known."""

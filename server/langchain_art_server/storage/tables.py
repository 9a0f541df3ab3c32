"""The tables of the database, and the conversion of their rows to values and back.

Every row has a seal (`storage.seals`), which is checked when the row is read. Token arrays are
little-endian blobs (int32 ids, int64 for a prompt with images, float64 logprobs), so that values
are read exactly as they were written. Bodies are compressed JSON.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json, to_json

from langchain_art.wire import CallTags, Checkpoint, RolledBack, TrainJob, TrainResult, Trajectory
from langchain_art.wire.training import OPEN_STATES
from langchain_art_server.storage.seals import SEAL, Blob, insert, intact, values_of

META = sa.MetaData()
#: Fields of `CallRecord` that are arrays, and the type of their items.
_ARRAYS = {"prompt_token_ids": "i", "token_ids": "i", "logprobs": "d"}

#: The order in which rows were inserted, whatever the clock says. In SQLite it is the rowid.
NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
#: Of the tables below. Another number, or another column, is refused at the start.
SCHEMA_VERSION = 13
#: Bytes of JSON from which on it is compressed, and the first byte of what zlib compressed. zlib
#: gives up the interpreter's lock, and to get it back takes the writer of many calls longer than to
#: write the bytes; SQLite writes pages of 4096.
_LONG, _ZLIB = 4096, b"x"
SCHEMA = sa.Table(
    "art_schema",
    META,
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("starts", sa.Integer, nullable=False),  # how often a server opened the database
)


def sealed_table(
    name: str, *columns: sa.Column[Any], kind: str, named_by: tuple[str, ...] = ("id",)
) -> sa.Table:
    """A table whose rows have a seal; messages name one by its `kind` and `named_by`."""
    sealed = sa.Column(SEAL, Blob, nullable=False)
    return sa.Table(name, META, *columns, sealed, info={"kind": kind, "named_by": named_by})


CALLS = sealed_table(
    "calls",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(160), unique=True, nullable=False),
    sa.Column("began", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("trajectory_id", sa.String(128), index=True),
    sa.Column("policy", sa.String(64)),
    sa.Column("version", sa.Integer),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("tags", sa.Text, nullable=False),
    sa.Column("request", Blob, nullable=False),
    sa.Column("reply", Blob, nullable=False),
    sa.Column("prompt_token_ids", Blob, nullable=False),
    sa.Column("token_ids", Blob, nullable=False),
    sa.Column("logprobs", Blob, nullable=False),
    sa.Column("drawn_from", Blob, nullable=False),
    sa.Column("temperature", sa.Float, nullable=False),
    sa.Column("finish_reason", sa.String(16), nullable=False),
    sa.Column("excluded_because", sa.Text),
    sa.Column("latency", sa.Float, nullable=False),
    sa.Column("retry", sa.Integer, nullable=False),
    kind="call",
)
#: Images that calls were shown, each once; one is deleted with the last of its calls.
IMAGES = sealed_table(
    "images",
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("body", Blob, nullable=False),
    kind="image",
    named_by=("sha256",),
)
CALL_IMAGES = sealed_table(
    "call_images",
    sa.Column("call_id", sa.String(160), primary_key=True),
    sa.Column("sha256", sa.String(64), primary_key=True, index=True),
    kind="image of a call",
    named_by=("call_id", "sha256"),
)
TRAJECTORIES = sealed_table(
    "trajectories",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(128), unique=True, nullable=False),
    sa.Column("group_id", sa.String(128), index=True),
    sa.Column("scenario", sa.String(256), index=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("body", Blob, nullable=False),
    sa.Column("reward", sa.Float),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("assembled", sa.Boolean, nullable=False),
    kind="trajectory",
)
#: The calls of each trajectory: a call is deleted with the last of them.
RUN_CALLS = sealed_table(
    "run_calls",
    sa.Column("trajectory_id", sa.String(128), primary_key=True),
    sa.Column("call_id", sa.String(160), primary_key=True, index=True),
    kind="call of a run",
    named_by=("trajectory_id", "call_id"),
)
#: What a policy learned from, each with the job. Several jobs may have trained on one run: on
#: branches that a rollback parted, or because `retrain` was asked for.
TRAINED = sealed_table(
    "trained",
    sa.Column("trajectory_id", sa.String(128), primary_key=True),
    sa.Column("policy", sa.String(64), primary_key=True),
    sa.Column("job_id", sa.String(64), primary_key=True),
    kind="mark of training",
    named_by=("trajectory_id", "policy"),
)
#: Calls whose tokens a policy learned from; only the policy that sampled a call learns from it.
TRAINED_CALLS = sealed_table(
    "trained_calls",
    sa.Column("call_id", sa.String(160), primary_key=True),
    sa.Column("job_id", sa.String(64), primary_key=True),
    kind="mark of training",
    named_by=("call_id",),
)
POLICIES = sealed_table(
    "policies",
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("lora", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    kind="policy",
    named_by=("name",),
)
CHECKPOINTS = sealed_table(
    "checkpoints",
    sa.Column("policy", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("parent", sa.Integer),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("pinned", sa.Boolean, nullable=False),
    sa.Column("metrics", sa.Text, nullable=False),
    kind="version",
    named_by=("policy", "version"),
)
JOBS = sealed_table(
    "jobs",
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), unique=True, nullable=False),
    sa.Column("key", sa.String(128), unique=True, nullable=False),
    sa.Column("policy", sa.String(64), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("payload", Blob, nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("base_version", sa.Integer),
    sa.Column("target_version", sa.Integer),
    sa.Column("result", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("retryable", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
    kind="job",
)
EVENTS = sealed_table(
    "job_events",
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("progress", sa.Float),
    kind="event",
    named_by=("job_id", "seq"),
)
#: What people said of runs and calls (`storage.review_store`).
REVIEWS = sealed_table(
    "reviews",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
    sa.Column("source", sa.String(64), nullable=False),
    sa.Column("id", sa.String(128), nullable=False),
    sa.Column("trajectory_id", sa.String(128), index=True, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("body", Blob, nullable=False),
    kind="review",
)
sa.Index("ix_reviews_source_id", REVIEWS.c.source, REVIEWS.c.id, unique=True)
#: The verdicts that jobs train: written with the job, and deleted when it has ended without having
#: trained them. A job that failed or was cancelled trained none.
TRAINED_VERDICTS = sealed_table(
    "trained_verdicts",
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("trajectory_id", sa.String(128), primary_key=True, index=True),
    sa.Column("call_id", sa.String(160), primary_key=True),  # "": the whole run
    sa.Column("kind", sa.String(16), primary_key=True),  # `PlannedVerdict.kind`
    sa.Column("policy", sa.String(64), index=True, nullable=False),
    sa.Column("name", sa.String(256), nullable=False),  # of the score; "" of a correction
    sa.Column("said", sa.Text, nullable=False),  # the value, or the correction's digest
    sa.Column("taught_by", sa.String(128), nullable=False),  # what the job's manifest names of it
    sa.Column("reviews", sa.Text, nullable=False),  # source and id of each
    kind="mark of a verdict",
    named_by=("job_id", "trajectory_id"),
)
#: Scenarios that an evaluation ran. They stay held out when its runs are deleted.
HELD_OUT_SCENARIOS = sealed_table(
    "held_out_scenarios",
    sa.Column("scenario", sa.String(256), primary_key=True),
    kind="held-out scenario",
    named_by=("scenario",),
)
#: Rollbacks: which version each took out of service, when and why.
ROLLBACKS = sealed_table(
    "rollbacks",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
    sa.Column("policy", sa.String(64), index=True, nullable=False),
    sa.Column("former", sa.Integer, nullable=False),  # served until then
    sa.Column("version", sa.Integer, nullable=False),  # serves from then on
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("why", sa.Text, nullable=False),
    kind="rollback",
    named_by=("number",),
)
#: Who may use the server, beside its administrator; those of all tenants are in the database of the
#: tenant `default` (`storage.key_store`). A key itself is not stored.
API_KEYS = sealed_table(
    "api_keys",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), unique=True, nullable=False),
    sa.Column("hash", sa.String(64), unique=True, nullable=False),  # SHA-256, in hex
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("scopes", sa.Text, nullable=False),
    sa.Column("limits", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
    sa.Column("revoked_at", sa.Float),
    kind="API key",
)
#: Who trained, rolled back, deleted, reviewed, made and revoked keys; of all tenants, as the keys.
ACTIONS = sealed_table(
    "actions",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("key", sa.String(64)),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    kind="entry of the log",
    named_by=("number",),
)
#: Rollouts that workers lease, their batches, and the workers.
BATCHES = sealed_table(
    "rollout_batches",
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("rollout", sa.String(256), nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("asked_at", sa.Float, nullable=False),  # when its owner last asked
    sa.Column("expired", sa.Integer, nullable=False),
    sa.Column("late", sa.Integer, nullable=False),
    kind="batch of rollouts",
)
ROLLOUTS = sealed_table(
    "rollouts",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(128), unique=True, nullable=False),
    sa.Column("batch", sa.String(128), index=True, nullable=False),
    sa.Column("rollout", sa.String(256), nullable=False),
    sa.Column("name", sa.String(256)),
    sa.Column("scenario", Blob, nullable=False),
    sa.Column("seed", sa.Text),
    sa.Column("state", sa.String(16), nullable=False),  # queued, leased or finished
    sa.Column("attempt", sa.Integer, nullable=False),  # how often it was leased
    sa.Column("failures", sa.Integer, nullable=False),  # attempts that count to `max_attempts`
    sa.Column("trajectory_id", sa.String(128), index=True),  # of the attempt
    sa.Column("worker", sa.String(128)),
    sa.Column("expires_at", sa.Float, index=True),
    sa.Column("trajectory", Blob),
    sa.Column("error", sa.Text),
    sa.Column("fatal", sa.Boolean, nullable=False),
    kind="rollout",
)
sa.Index("ix_rollouts_rollout_state", ROLLOUTS.c.rollout, ROLLOUTS.c.state)
WORKERS = sealed_table(
    "workers",
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("rollout", sa.String(256), nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("finished", sa.Integer, nullable=False),
    sa.Column("failed", sa.Integer, nullable=False),
    sa.Column("expired", sa.Integer, nullable=False),
    sa.Column("heard_at", sa.Float, nullable=False),
    kind="worker",
)
#: Who changes a policy now (`storage.fleet`); a deleted policy's row stays.
POLICY_LEASES = sealed_table(
    "policy_leases",
    sa.Column("policy", sa.String(64), primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),  # grows by 1 with each lease
    sa.Column("holder", sa.String(64), nullable=False),
    sa.Column("until", sa.Float, nullable=False),  # the database's clock, seconds of the epoch
    kind="lease of policy",
    named_by=("policy",),
)
#: The order in which calls begin, of all servers of a fleet; PostgreSQL's alone.
CALLS_BEGAN = sa.Sequence("calls_began", metadata=META, data_type=sa.BigInteger)
#: Jobs that wait or run.
IS_OPEN = JOBS.c.state.in_(OPEN_STATES)


@dataclass(frozen=True)
class CallRecord:
    """One completion: request, reply, token ids and logprobs (nats), one of each per sampled token.

    `excluded_because` is the reason why it is not trained, if it is not; `latency` is in seconds.
    """

    id: str
    created_at: float
    policy: str | None
    version: int | None
    model: str
    tags: CallTags
    request: dict[str, Any]
    """``messages``, ``tools`` and the sampling parameters."""
    reply: dict[str, Any]
    """OpenAI's assistant message."""
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    temperature: float
    finish_reason: str
    excluded_because: str | None
    latency: float
    drawn_from: bytes = b""
    """The tokens that each token was drawn from (`token_sets.pack`); empty: all of them."""
    began: int = 0
    """Grows with each request, over restarts: the order in which calls began."""
    retry: int = 0
    """Number of times that the client had sent this request before (the header
    ``x-stainless-retry-count`` of the OpenAI SDKs)."""
    number: int = field(default=0, compare=False)
    """The database's: the order in which calls were recorded."""
    images: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Those that its ``request["images"]`` names, where they were read, too."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that its prompt shows: of a choice of ``allowed_tools``, these alone."""
        tools: list[dict[str, Any]] = self.request.get("tools") or []
        choice: Any = self.request.get("tool_choice")
        if not isinstance(choice, dict) or "allowed_tools" not in choice:
            return tools
        allowed = [one["function"]["name"] for one in choice["allowed_tools"]["tools"]]
        return [one for one in tools if one["function"]["name"] in allowed]

    def row(self) -> dict[str, Any]:
        """This record as a row of the table."""
        values = vars(self) | {
            "trajectory_id": self.tags.trajectory_id,
            "tags": self.tags.model_dump_json(exclude_defaults=True),
            "request": pack(self.request),
            "reply": pack(self.reply),
            **{name: array(code, getattr(self, name)).tobytes() for name, code in self._arrays()},
        }
        del values["number"], values["images"]
        return values

    def _arrays(self) -> Iterable[tuple[str, str]]:
        wide = {"prompt_token_ids": "q"} if "images" in self.request else {}
        return (_ARRAYS | wide).items()

    @classmethod
    def of(cls, row: sa.Row[Any]) -> CallRecord:
        """The record of a row, without images. Raises Damaged."""
        intact(CALLS, row)
        values: dict[str, Any] = {
            one.name: getattr(row, one.name) for one in fields(cls) if one.name != "images"
        }
        values["tags"] = CallTags.model_validate_json(row.tags)
        values |= {name: unpack(values[name]) for name in ("request", "reply")}
        record = cls(**values)
        return replace(
            record, **{name: array(code, values[name]).tolist() for name, code in record._arrays()}
        )

    def public(self) -> dict[str, Any]:
        """Answer of ``GET /v1/calls/{id}``.

        ``restricted``: it was drawn from a part of the vocabulary, which this does not show.
        """
        known = asdict(replace(self, images={}))
        del known["images"]
        return known | {
            "tags": self.tags.model_dump(exclude_defaults=True),
            "trainable": self.excluded_because is None,
            "restricted": bool(known.pop("drawn_from")),
        }


@dataclass(frozen=True)
class StoredRun:
    """A trajectory in the database."""

    trajectory: Trajectory
    assembled: bool
    """True if it was assembled from calls that were tagged with its id."""
    trained_by: dict[str, str]
    """policy -> the last job that trained it on this run."""


def pack(value: Any) -> bytes:
    """A value as JSON, compressed if it is long."""
    body = to_json(value)
    return body if len(body) < _LONG else zlib.compress(body, 1)


def unpack(blob: bytes) -> Any:
    """The value that `pack` was given. JSON of an object does not begin as zlib's header does."""
    return from_json(zlib.decompress(blob) if blob.startswith(_ZLIB) else blob)


def digest(body: bytes) -> str:
    """SHA-256 of a body, in hex."""
    return hashlib.sha256(body).hexdigest()


def version_is(policy: str, version: int) -> sa.ColumnElement[bool]:
    """The condition on `CHECKPOINTS` for one version."""
    return (CHECKPOINTS.c.policy == policy) & (CHECKPOINTS.c.version == version)


def insert_checkpoint(connection: sa.Connection, checkpoint: Checkpoint) -> None:
    """Insert a version's row, unless it exists."""
    mine = version_is(checkpoint.policy, checkpoint.version)
    if not connection.execute(sa.select(CHECKPOINTS.c.version).where(mine)).first():
        row = checkpoint.model_dump(exclude={"name", "serving", "metrics", "rolled_back"})
        row["metrics"] = to_json(checkpoint.metrics).decode()
        insert(connection, CHECKPOINTS, [row])


def checkpoint_of(
    row: sa.Row[Any], serving: int | None, rolled_back: RolledBack | None = None
) -> Checkpoint:
    """The version of a row; `serving` is the one that serves. Raises Damaged."""
    values = values_of(CHECKPOINTS, intact(CHECKPOINTS, row))
    del values["seal"]
    values |= {"metrics": from_json(row.metrics), "serving": row.version == serving}
    return Checkpoint(name=f"{row.policy}@{row.version}", rolled_back=rolled_back, **values)


def trajectory_row(
    trajectory: Trajectory, group_id: str | None, *, assembled: bool = False
) -> dict[str, Any]:
    """A trajectory as a row of the table."""
    body = to_json(trajectory.model_dump(mode="json"))
    return {
        "id": trajectory.id,
        "group_id": group_id,
        "scenario": trajectory.scenario,
        "digest": digest(body),
        "body": zlib.compress(body, 1),
        "reward": trajectory.reward,
        "created_at": time.time(),
        "assembled": assembled,
    }


def trajectory_of(row: sa.Row[Any]) -> Trajectory:
    """The trajectory of a row. Raises Damaged."""
    return Trajectory.model_validate_json(zlib.decompress(intact(TRAJECTORIES, row).body))


def job_of(row: sa.Row[Any]) -> TrainJob:
    """The job of a row. Raises Damaged."""
    intact(JOBS, row)
    values = {name: getattr(row, name) for name in TrainJob.model_fields}
    values["result"] = TrainResult.model_validate_json(row.result) if row.result else None
    return TrainJob(**values)

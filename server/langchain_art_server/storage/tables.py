"""The tables, and what a row of each is as a value. `store` reads and writes them.

Token arrays are little-endian blobs: int32 ids, float64 logprobs, so that what is read equals what
was written, bit for bit. Bodies are JSON, compressed.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import sqlalchemy as sa
from pydantic_core import from_json, to_json

from langchain_art.wire import CallTags, Checkpoint, JobState, TrainJob, TrainResult, Trajectory

META = sa.MetaData()

CALLS = sa.Table(
    "calls",
    META,
    sa.Column("id", sa.String(160), primary_key=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("trajectory_id", sa.String(128), index=True),
    sa.Column("policy", sa.String(64)),
    sa.Column("version", sa.Integer),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("tags", sa.Text, nullable=False),
    sa.Column("request", sa.LargeBinary, nullable=False),
    sa.Column("reply", sa.LargeBinary, nullable=False),
    sa.Column("prompt_token_ids", sa.LargeBinary, nullable=False),
    sa.Column("token_ids", sa.LargeBinary, nullable=False),
    sa.Column("logprobs", sa.LargeBinary, nullable=False),
    sa.Column("temperature", sa.Float, nullable=False),
    sa.Column("finish_reason", sa.String(16), nullable=False),
    sa.Column("excluded_because", sa.Text),
    sa.Column("latency", sa.Float, nullable=False),
    sa.Column("retry", sa.Integer, nullable=False),
)
TRAJECTORIES = sa.Table(
    "trajectories",
    META,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("group_id", sa.String(128), index=True),
    sa.Column("scenario", sa.String(256), index=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("reward", sa.Float),
    sa.Column("created_at", sa.Float, nullable=False, index=True),
    sa.Column("assembled", sa.Boolean, nullable=False),
)
TRAINED = sa.Table(
    "trained",
    META,
    sa.Column("trajectory_id", sa.String(128), primary_key=True),
    sa.Column("policy", sa.String(64), primary_key=True),
    sa.Column("job_id", sa.String(64), nullable=False),
)
POLICIES = sa.Table(
    "policies",
    META,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("lora", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)
CHECKPOINTS = sa.Table(
    "checkpoints",
    META,
    sa.Column("policy", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("parent", sa.Integer),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("pinned", sa.Boolean, nullable=False),
    sa.Column("metrics", sa.Text, nullable=False),
)
JOBS = sa.Table(
    "jobs",
    META,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), unique=True, nullable=False),
    sa.Column("key", sa.String(128), unique=True, nullable=False),
    sa.Column("policy", sa.String(64), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("base_version", sa.Integer),
    sa.Column("target_version", sa.Integer),
    sa.Column("result", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("finished_at", sa.Float),
)
EVENTS = sa.Table(
    "job_events",
    META,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("progress", sa.Float),
)


@dataclass(frozen=True)
class CallRecord:
    """One completion, whole: what was asked, what was shown, what was said, how sure it was.

    `len(logprobs) == len(token_ids)`. `excluded_because` says why the learner must leave it out.
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
    retry: int = 0
    """How often the client had sent this request before, by its own account
    (``x-stainless-retry-count``, which the OpenAI SDKs send)."""

    def row(self) -> dict[str, Any]:
        """This record as a row of the table."""
        return {
            "id": self.id,
            "created_at": self.created_at,
            "trajectory_id": self.tags.trajectory_id,
            "policy": self.policy,
            "version": self.version,
            "model": self.model,
            "tags": self.tags.model_dump_json(exclude_defaults=True),
            "request": pack(self.request),
            "reply": pack(self.reply),
            "prompt_token_ids": array("i", self.prompt_token_ids).tobytes(),
            "token_ids": array("i", self.token_ids).tobytes(),
            "logprobs": array("d", self.logprobs).tobytes(),
            "temperature": self.temperature,
            "finish_reason": self.finish_reason,
            "excluded_because": self.excluded_because,
            "latency": self.latency,
            "retry": self.retry,
        }

    @classmethod
    def of(cls, row: sa.Row[Any]) -> CallRecord:
        """The record of a row."""
        return cls(
            id=row.id,
            created_at=row.created_at,
            policy=row.policy,
            version=row.version,
            model=row.model,
            tags=CallTags.model_validate_json(row.tags),
            request=unpack(row.request),
            reply=unpack(row.reply),
            prompt_token_ids=_ints(row.prompt_token_ids),
            token_ids=_ints(row.token_ids),
            logprobs=array("d", row.logprobs).tolist(),
            temperature=row.temperature,
            finish_reason=row.finish_reason,
            excluded_because=row.excluded_because,
            latency=row.latency,
            retry=row.retry,
        )

    def public(self) -> dict[str, Any]:
        """What ``GET /v1/calls/{id}`` answers."""
        public = asdict(self) | {
            "tags": self.tags.model_dump(exclude_defaults=True),
            "trainable": self.excluded_because is None,
        }
        return public


@dataclass(frozen=True)
class StoredRun:
    """A trajectory, and what became of it here."""

    trajectory: Trajectory
    assembled: bool
    """Put together here, from calls that were tagged with its id."""
    trained_by: dict[str, str]
    """policy -> the job that trained it on this run."""


def _ints(blob: bytes) -> list[int]:
    return array("i", blob).tolist()


def pack(value: Any) -> bytes:
    """A value as compressed JSON."""
    return zlib.compress(to_json(value), 1)


def unpack(blob: bytes) -> Any:
    """The value of compressed JSON."""
    return from_json(zlib.decompress(blob))


def digest(body: bytes) -> str:
    """SHA-256 of a body, in hex: two bodies are the same if their digests are."""
    return hashlib.sha256(body).hexdigest()


def checkpoint_row(checkpoint: Checkpoint) -> dict[str, Any]:
    """A version as a row of the table."""
    row = checkpoint.model_dump(exclude={"name", "serving", "metrics"})
    return row | {"metrics": to_json(checkpoint.metrics).decode()}


def insert_checkpoint(connection: sa.Connection, checkpoint: Checkpoint) -> None:
    """Add a version's row, unless it is there."""
    mine = (CHECKPOINTS.c.policy == checkpoint.policy) & (
        CHECKPOINTS.c.version == checkpoint.version
    )
    if connection.execute(sa.select(CHECKPOINTS.c.version).where(mine)).first():
        return
    connection.execute(sa.insert(CHECKPOINTS), [checkpoint_row(checkpoint)])


def checkpoint_of(row: sa.Row[Any], serving: int | None) -> Checkpoint:
    """The version of a row."""
    return Checkpoint(
        policy=row.policy,
        version=row.version,
        name=f"{row.policy}@{row.version}",
        parent=row.parent,
        created_at=row.created_at,
        bytes=row.bytes,
        pinned=row.pinned,
        serving=row.version == serving,
        metrics=from_json(row.metrics),
    )


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
    """The trajectory of a row."""
    return Trajectory.model_validate_json(zlib.decompress(row.body))


def job_of(row: sa.Row[Any]) -> TrainJob:
    """The job of a row."""
    return TrainJob(
        id=row.id,
        key=row.key,
        policy=row.policy,
        state=cast(JobState, row.state),
        base_version=row.base_version,
        result=TrainResult.model_validate_json(row.result) if row.result else None,
        error=row.error,
        created_at=row.created_at,
        finished_at=row.finished_at,
    )

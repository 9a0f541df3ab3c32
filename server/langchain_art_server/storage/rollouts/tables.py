"""The tables of rollouts that workers lease, of their batches and of the workers."""

from __future__ import annotations

import sqlalchemy as sa

from langchain_art_server.storage.seals import Blob
from langchain_art_server.storage.tables import NUMBER, sealed_table

BATCHES = sealed_table(
    "rollout_batches",
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("rollout", sa.String(256), nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("asked_at", sa.Float, nullable=False),  # when its owner last asked
    sa.Column("expired", sa.Integer, nullable=False),
    sa.Column("late", sa.Integer, nullable=False),
    kind="batch of rollouts",
    named_by=("id",),
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
    named_by=("id",),
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
    named_by=("id",),
)

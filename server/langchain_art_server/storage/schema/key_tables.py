"""The tables of API keys, and of what was done with them."""

from __future__ import annotations

import sqlalchemy as sa

from langchain_art_server.storage.tables import NUMBER, sealed_table

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
    named_by=("id",),
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

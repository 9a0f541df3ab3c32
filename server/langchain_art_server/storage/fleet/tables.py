"""The tables of what several servers agree on."""

from __future__ import annotations

import sqlalchemy as sa

from langchain_art_server.storage.tables import META, sealed_table

#: Who changes a policy now (`storage.fleet.policy_leases`); a deleted policy's row stays.
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

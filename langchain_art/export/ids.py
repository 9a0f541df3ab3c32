"""The ids of what is exported, computed from a run's id; names that are read back with a trace.

=============  ==================================================================
id             formula (hexadecimal digits)
=============  ==================================================================
trace          the first 32 of ``sha256(run id)``, as ``Langfuse.create_trace_id(seed=run id)``
root span      the first 16 of ``sha256(run id + "/root")``
model call     the first 16 of ``sha256(run id + "/call/" + call id)``
other span     the first 16 of ``sha256(run id + "/span/" + its number)``
score          the first 32 of ``sha256(trace or observation id + "/score/" + name)``
=============  ==================================================================

A run that is sent twice has the same ids, and Langfuse keeps one of each.
"""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from langchain_art.wire import HUMAN_REWARD as HUMAN_REWARD
from langchain_art.wire import Turn


def trace_id(run: str) -> str:
    """The trace of a run, by the run's id: 32 hexadecimal digits."""
    return _hash(run)[:32]


def root_id(run: str) -> str:
    """The root span of a run: 16 hexadecimal digits."""
    return _hash(f"{run}/root")[:16]


def call_observation_id(run: str, call: str) -> str:
    """The span of a model call, by the ids of its run and of the call (`wire.Turn.call_id`)."""
    return _hash(f"{run}/call/{call}")[:16]


def turn_observation_id(run: str, turn: Turn, index: int) -> str:
    """The span of turn `index` of a run, which may be a call without an id."""
    return call_observation_id(run, turn.call_id if turn.call_id is not None else f"#{index}")


def span_id(run: str, number: int) -> str:
    """The span of a node or a tool, by its number among the run's spans."""
    return _hash(f"{run}/span/{number}")[:16]


def score_id(subject: str, name: str) -> str:
    """A score of a trace or an observation, by that one's id."""
    return _hash(f"{subject}/score/{name}")[:32]


def experiment_id(fit: str, step: int | None, versions: str) -> str:
    """Langfuse's experiment of one evaluation of one version."""
    return _hash(f"{fit}/{step}/{versions}")[:32]


def trace_url(base_url: str, project: str, run: str) -> str:
    """Address at which Langfuse shows a run's trace.

    Args:
        base_url: of the server, such as ``https://cloud.langfuse.com``.
        project: Langfuse's id of the project (in the address of each of its pages).
        run: the run's id.
    """
    return f"{base_url.rstrip('/')}/project/{quote(project, safe='')}/traces/{trace_id(run)}"


def _hash(seed: str) -> str:
    return hashlib.sha256(seed.encode()).hexdigest()


#: In the metadata of every observation: the id of the run (`Trajectory.id`).
TRAJECTORY = "trajectory_id"
#: In the metadata of a generation: the id of the call (`Turn.call_id`).
CALL = "call_id"
#: In the metadata of every observation: the scenario's name (`Trajectory.scenario`), if it has one.
SCENARIO = "scenario"
#: In the metadata of a generation: why it is not trained; of these, why the graph discarded it.
EXCLUDED = "excluded_because"
DISCARDED = ("retried", "interrupted", "error", "unchosen")
#: In `Trajectory.metadata`: a fit or an evaluation has exported the run.
EXPORTED = "exported"
#: The score of a run's reward.
REWARD = "reward"

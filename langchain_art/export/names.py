"""Names that are written with a trace and read back with it: elsewhere they are not spelled out."""

from __future__ import annotations

from langchain_art.wire import HUMAN_REWARD as HUMAN_REWARD

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

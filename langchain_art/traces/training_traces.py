"""OpenEnv's training traces (`TrainingTrace`, schema 1): the calls of a run with their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from langchain_art.client.sync_client import ArtClient, found_or_none
from langchain_art.errors import ConfigError
from langchain_art.export.stored_messages import prompt_of, reply_of
from langchain_art.traces.stored import StoredTrace, Unreadable, scenario_of, score_of
from langchain_art.wire import Turn

SCHEMA = 1


def training_trace(client: ArtClient, run_id: str) -> dict[str, Any]:
    """A run of the server as OpenEnv's `TrainingTrace`, ready for JSON.

    Each call that the server sampled is a turn: its exact tokens, their logprobs, and a mask that
    is 1 where the run's training counts the token (`TrajectoryAudit`). The turn's metadata say
    which node of the graph made the call, and which turn it goes on from.

    Raises:
        NotFound: the server has no such run.
        ConfigError: it sampled none of the run's calls.
    """
    run, audit = client.trajectory(run_id), client.audit(run_id)
    turns: list[dict[str, Any]] = []
    for turn, counted in zip(run.turns, audit.turns, strict=True):
        record = found_or_none(client.call, turn.call_id) if turn.call_id else None
        if record is None:  # another model's
            continue
        message = {"message": record["reply"], "finish_reason": record["finish_reason"]}
        about = turn.model_dump(
            mode="json",
            include={"node", "path", "namespace", "step", "attempt", "tags", "model", "reward"},
        )
        about |= {"run": run.id, "scenario": run.scenario, "run_reward": run.reward}
        about |= {"excluded_because": counted.excluded_because, "restricted": record["restricted"]}
        about["sampling_params"] = {"temperature": record["temperature"]}
        mask = [int(counted.excluded_because is None)] * len(record["token_ids"])
        before = None if turn.extends is None else run.turns[turn.extends].call_id
        turns.append(
            {
                "node_id": turn.call_id,
                "prompt_token_ids": record["prompt_token_ids"],
                "completion_token_ids": record["token_ids"],
                "per_token_logps": [min(one, 0.0) for one in record["logprobs"]],  # of rounding
                "loss_mask": [0] * len(record["prompt_token_ids"]) + mask,
                "request": record["request"],
                "response": {"choices": [message]},
                "metadata": {**about, "extends": before},
            }
        )
    if not turns:
        raise ConfigError(f"got the run {run_id!r}, none of whose calls this server sampled")
    return {"schema_version": SCHEMA, "turns": turns}


def stored_trace(line: Mapping[str, Any]) -> StoredTrace:
    """A training trace as a stored one; ``id``, ``scenario`` and ``score`` may stand beside it.

    Raises Unreadable, or what reading another shape raises (`Read.add` counts it). Its calls have
    the turns' ``node_id`` as ids: this server knows its own.
    """
    if line["schema_version"] != SCHEMA or not line.get("turns"):
        raise Unreadable("unknown_shape" if line.get("turns") else "no_calls")
    calls = [_call(turn) for turn in line["turns"]]
    known: Mapping[str, Any] = line["turns"][0].get("metadata") or {}
    prompt = calls[0].messages
    first = next((one for one in prompt if one["role"] == "user"), prompt[-1])
    written = json.dumps([turn["node_id"] for turn in line["turns"]])
    return StoredTrace(
        id=str(line.get("id") or hashlib.sha256(written.encode()).hexdigest()[:32]),
        input=first.get("content"),
        output=(calls[-1].reply or {}).get("content"),
        calls=calls,
        run=known.get("run"),
        scenario=scenario_of(line.get("scenario")) or scenario_of(known.get("scenario")),
        score=score_of([line.get("score")]),
    )


def _call(turn: Mapping[str, Any]) -> Turn:
    messages, tools = prompt_of(turn["request"])
    about: Mapping[str, Any] = turn.get("metadata") or {}
    masked = None if any(turn["loss_mask"]) else about.get("excluded_because") or "masked"
    return Turn(
        call_id=turn["node_id"],
        node=about.get("node"),
        path=tuple(about.get("path") or ()),
        model=about.get("model"),
        messages=tuple(messages),
        tools=tuple(tools),
        reply=reply_of(turn["response"]["choices"][0]["message"]),
        excluded_because=masked,
        ours=False,
    )

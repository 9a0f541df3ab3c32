"""The audit of one run: which of its tokens are trained, and why the others are not.

It calls the functions that a training job calls (`check_eligibility`, `rows_of`), so its answer is
what a job would do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from langchain_art.errors import InvalidRequest
from langchain_art.wire import TrajectoryAudit, TurnAudit
from langchain_art_server.algorithms.sequences.prefix_tree import PrefixTree
from langchain_art_server.jobs.batch_builder import rows_of
from langchain_art_server.jobs.eligibility import CallEligibility, check_eligibility
from langchain_art_server.storage.tables import CallRecord, StoredRun


def chosen_calls(pairs: Sequence[str]) -> dict[str, bool]:
    """`TrainRequest.trainable` from a query: ``["writer:true", "critic:false"]``.

    Raises:
        InvalidRequest: a pair is malformed, or a name is chosen and not chosen.
    """
    trainable: dict[str, bool] = {}
    for pair in pairs:
        name, _, choice = pair.rpartition(":")
        if not name or choice not in ("true", "false"):
            raise InvalidRequest(
                f"got trainable={pair!r}, expected NAME:true or NAME:false, once per name",
                param="trainable",
            )
        if trainable.setdefault(name, choice == "true") != (choice == "true"):
            raise InvalidRequest(
                f"got trainable={name}:true and trainable={name}:false, expected one of them",
                param="trainable",
            )
    return trainable


def audit(
    stored: StoredRun,
    records: Mapping[str, CallRecord],
    policy: str | None,
    trainable: Mapping[str, bool],
    *,
    imitates: bool = False,
    trained: Collection[str] = (),
) -> TrajectoryAudit:
    """Audit a run; the arguments are those of `check_eligibility`.

    For a supervised step, the run and the records are those of `sft_records`.

    Raises:
        InvalidRequest: a record is invalid; training raises the same error.
    """
    run = stored.trajectory
    judged = check_eligibility(run, records, policy, trainable, imitates=imitates, trained=trained)
    learners: defaultdict[str | None, list[CallEligibility]] = defaultdict(list)
    for one in judged:
        learners[policy if imitates else one.policy].append(one)
    tree = PrefixTree()
    return TrajectoryAudit(
        trajectory=run.id,
        status=run.status,
        reward=run.reward,
        turns=tuple(_turn(index, one, tree) for index, one in enumerate(judged)),
        rows=sum(len(rows_of(turns)) for turns in learners.values()),
        trained_by=stored.trained_by,
    )


def _turn(index: int, judged: CallEligibility, tree: PrefixTree) -> TurnAudit:
    """The audit of turn `index`; `tree` holds those before it."""
    turn, record = judged.turn, judged.record
    known: dict[str, Any] = {"prefix": None, "prefix_turn": None, "prefix_tokens": 0}
    if record is not None:
        prompt, sampled = len(record.prompt_token_ids), len(record.token_ids)
        found = tree.meet(record.prompt_token_ids)
        known["prefix_tokens"] = found.shared
        if not found.shared:
            known["prefix"] = "starts"
        elif found.ends:
            known |= {"prefix": "extends", "prefix_turn": found.ends[-1]}
        else:
            known |= {"prefix": "forks", "prefix_turn": found.passes}
        tree.add(index, [*record.prompt_token_ids, *record.token_ids])
    else:
        usage = turn.usage
        prompt, sampled = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return TurnAudit(
        call_id=turn.call_id,
        node=turn.node,
        path=turn.path,
        model=record.model if record else turn.model,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        trained_tokens=sampled if judged.excluded_because is None else 0,
        excluded_because=judged.excluded_because,
        **known,
    )

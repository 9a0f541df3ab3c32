"""The versions that steps measure from: teachers, and references of a KL penalty."""

from __future__ import annotations

import logging

from langchain_art.errors import Damaged
from langchain_art.wire import TrainConfig, TrainRequest
from langchain_art_server.storage.job_store import JobStore

log = logging.getLogger(__name__)


def reference_of(request: TrainRequest) -> tuple[str, int]:
    """The policy and version that a step measures from; version 0: the base model, or nothing."""
    config = request.config
    if not isinstance(config, TrainConfig):
        return request.policy, 0
    if config.distillation is not None:
        return config.distillation.version
    return request.policy, (config.kl.reference or 0) if config.kl is not None else 0


async def waited_for(jobs: JobStore, policy: str) -> set[int]:
    """The versions of a policy that jobs which wait or run measure from."""
    found: set[int] = set()
    for job in await jobs.open_ids():
        try:
            whose, version = reference_of((await jobs.payload(job))[0])
        except Damaged as error:  # it is not run either
            log.error("What job %s measures from is not known: %s", job, error)
            continue
        if whose == policy:
            found.add(version)
    return found

"""The server's HTTP API: every operation as a `Request`, or as a `Flow` of several.

A `Flow` is a generator that yields requests and receives their answers, so that it is written once
for the sync and the async client.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from langchain_art.client.conversations import Conversations, read_conversations
from langchain_art.client.http_request import Flow, Request
from langchain_art.errors import ArtError, ConfigError, JobFailed
from langchain_art.wire import (
    Checkpoint,
    JobConfig,
    JobEvent,
    LoraConfig,
    PolicySpec,
    PolicyStatus,
    Reward,
    ServerStatus,
    SFTConfig,
    TrainConfig,
    TrainJob,
    TrainRequest,
    TrainResult,
    Trajectory,
    TrajectoryAudit,
    TrajectoryGroup,
)

M = TypeVar("M", bound=BaseModel)
Groups: TypeAlias = Sequence[TrajectoryGroup] | Sequence[Sequence[str]]
"""Trajectory groups, or the ids of trajectories that the server has."""
#: Imported conversations in one request, far below the limit of a request's size.
POSTED_AT_ONCE = 64


def many(model: type[M]) -> Callable[[bytes], list[M]]:
    """Reader of ``{"data": [...]}``."""

    def parse(content: bytes) -> list[M]:
        return [model.model_validate(item) for item in json.loads(content)["data"]]

    return parse


def _path(*parts: str | int) -> str:
    return "/".join(["/v1", *(quote(str(part), safe="") for part in parts)])


# --- one request each, documented in sync_client.py -------------------------------------------
# ruff: noqa: D103


def status() -> Request[ServerStatus]:
    return Request("GET", "/status", ServerStatus.model_validate_json)


def ready(timeout: float) -> Request[None]:
    return Request("GET", "/readyz", lambda _: None, patience=timeout)


def models() -> Request[list[str]]:
    return Request("GET", "/v1/models", lambda body: [m["id"] for m in json.loads(body)["data"]])


def create_policy(name: str, lora: LoraConfig | None) -> Request[PolicyStatus]:
    spec = PolicySpec(name=name, lora=lora or LoraConfig())
    return Request("POST", "/v1/policies", PolicyStatus.model_validate_json, body=spec)


def policies() -> Request[list[PolicyStatus]]:
    return Request("GET", "/v1/policies", many(PolicyStatus))


def policy(name: str) -> Request[PolicyStatus]:
    return Request("GET", _path("policies", name), PolicyStatus.model_validate_json)


def checkpoints(name: str) -> Request[list[Checkpoint]]:
    return Request("GET", _path("policies", name, "checkpoints"), many(Checkpoint))


def pin(name: str, version: int, *, pinned: bool) -> Request[Checkpoint]:
    path = _path("policies", name, "checkpoints", version, "pin")
    return Request("PUT" if pinned else "DELETE", path, Checkpoint.model_validate_json)


def delete_checkpoint(name: str, version: int) -> Request[str]:
    path = _path("policies", name, "checkpoints", version)
    return Request("DELETE", path, lambda body: str(json.loads(body)["deleted"]))


def rollback(name: str, version: int) -> Request[PolicyStatus]:
    body = {"version": version}
    return Request(
        "POST", _path("policies", name, "rollback"), PolicyStatus.model_validate_json, body=body
    )


def post_trajectory(trajectory: Trajectory) -> Request[bool]:
    return Request(
        "POST",
        "/v1/trajectories",
        lambda body: bool(json.loads(body)["stored"]),
        body=trajectory,
    )


def post_group(group: TrajectoryGroup) -> Request[int]:
    return Request("POST", "/v1/groups", lambda body: int(json.loads(body)["stored"]), body=group)


def trajectories(limit: int, scenario: str | None) -> Request[list[Trajectory]]:
    params = {"limit": limit, "scenario": scenario}
    return Request("GET", "/v1/trajectories", many(Trajectory), params=params)


def trajectory(trajectory_id: str) -> Request[Trajectory]:
    return Request("GET", _path("trajectories", trajectory_id), Trajectory.model_validate_json)


def audit(
    trajectory_id: str, policy_name: str | None, trainable: Mapping[str, bool] | None, *, sft: bool
) -> Request[TrajectoryAudit]:
    chosen = [f"{name}:{str(learns).lower()}" for name, learns in (trainable or {}).items()]
    path = _path("trajectories", trajectory_id, "audit")
    params = {"policy": policy_name, "trainable": chosen, "sft": "true" if sft else None}
    return Request("GET", path, TrajectoryAudit.model_validate_json, params=params)


def reward(
    trajectory_id: str, value: float | Reward | None, turns: Mapping[str, float] | None = None
) -> Request[Trajectory]:
    given = value.model_dump(exclude_unset=True) if isinstance(value, Reward) else {}
    if value is not None and not isinstance(value, Reward):
        given["reward"] = value
    if turns:
        given["turns"] = dict(turns)
    try:
        body = Reward(**given)
    except ValidationError as error:
        raise ConfigError(f"This is no reward: {error}") from error
    path = _path("trajectories", trajectory_id, "reward")
    return Request("PUT", path, Trajectory.model_validate_json, body=body)


def call(call_id: str) -> Request[dict[str, Any]]:
    return Request("GET", _path("calls", call_id), json.loads)


def jobs(policy_name: str | None) -> Request[list[TrainJob]]:
    return Request("GET", "/v1/jobs", many(TrainJob), params={"policy": policy_name})


def job(job_id: str, wait: float = 0.0) -> Request[TrainJob]:
    path = _path("jobs", job_id)
    return Request(
        "GET", path, TrainJob.model_validate_json, params={"wait": wait or None}, hold=wait
    )


def job_events(job_id: str, after: int) -> Request[list[JobEvent]]:
    path = _path("jobs", job_id, "events")
    return Request("GET", path, many(JobEvent), params={"after": after})


# --- several requests: flows ------------------------------------------------------------------


def posting(groups: Sequence[TrajectoryGroup]) -> Flow[int]:
    """Post groups one by one; returns how many trajectories were new to the server."""
    stored = 0
    for group in groups:
        stored += yield post_group(group)
    return stored


def training(
    groups: Groups,
    policy_name: str,
    config: JobConfig | None,
    key: str | None,
    trainable: Mapping[str, bool] | None,
) -> Flow[TrainJob]:
    """Post the groups that are not given as ids, then order the job."""
    ids: list[tuple[str, ...]] = []
    for group in groups:
        if isinstance(group, TrajectoryGroup):
            yield post_group(group)
            ids.append(tuple(run.id for run in group.trajectories))
        else:
            ids.append(tuple(group))
    try:
        body = TrainRequest(
            policy=policy_name,
            groups=tuple(ids),
            config=config or TrainConfig(),
            trainable=dict(trainable or {}),
        )
    except ValidationError as error:
        raise ConfigError(f"This cannot be trained on: {error}") from error
    headers = {"Idempotency-Key": key or f"once:{uuid.uuid4()}"}
    return (
        yield Request("POST", "/v1/train", TrainJob.model_validate_json, body=body, headers=headers)
    )


def imitating(
    conversations: Conversations,
    policy_name: str,
    config: SFTConfig | None,
    key: str | None,
    trainable: Mapping[str, bool] | None,
) -> Flow[TrainJob]:
    """Post the conversations that the server does not have, then order the job."""
    config = sft_config(config)
    ids: list[str] = yield from storing(read_conversations(conversations))
    return (yield from training([ids], policy_name, config, key, trainable))


def sft_config(config: SFTConfig | None) -> SFTConfig:
    """The config of a supervised step, or its default. Raises ConfigError."""
    config = config or SFTConfig()
    if not isinstance(config, SFTConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"got a {type(config).__name__}, expected an SFTConfig: conversations have no rewards "
            "to compare; train on groups with `train` or `Trainer.fit`"
        )
    return config


def storing(conversations: Sequence[Trajectory | str]) -> Flow[list[str]]:
    """Post trajectories that are not just ids; returns the ids of all."""
    new = [one for one in conversations if isinstance(one, Trajectory)]
    for start in range(0, len(new), POSTED_AT_ONCE):
        part = new[start : start + POSTED_AT_ONCE]
        yield post_group(TrajectoryGroup(id="conversations", trajectories=tuple(part)))
    return [one if isinstance(one, str) else one.id for one in conversations]


def waiting(
    awaited: TrainJob | str, on_event: Callable[[JobEvent], None] | None
) -> Flow[TrainResult]:
    """Poll a job until it ends, and pass its events to `on_event`. Raises JobFailed."""
    job_id = awaited if isinstance(awaited, str) else awaited.id
    seen = 0
    while True:
        # With `on_event` the long poll is short, so that events arrive within a second.
        state: TrainJob = yield job(job_id, wait=1.0 if on_event else 25.0)
        if on_event:
            events: list[JobEvent] = yield job_events(job_id, seen)
            for event in events:
                seen = max(seen, event.seq)
                on_event(event)
        if state.state == "failed":
            raise JobFailed(f"Job {state.id} of policy {state.policy!r} failed: {state.error}")
        if state.result is not None:
            return state.result


def downloading(name: str, version: int, dest: Path) -> Flow[Path]:
    """Download an adapter into `dest`, which is made complete or not at all."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError(f"{dest} exists and is not empty; choose another directory")
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-") as temporary:
        archive = Path(temporary) / "adapter.tar"
        path = _path("policies", name, "checkpoints", version, "adapter")
        yield Request("GET", path, lambda _: None, save=archive)
        unpacked = Path(temporary) / "adapter"
        unpacked.mkdir()
        unpack(archive, unpacked)
        if dest.exists():
            dest.rmdir()
        unpacked.rename(dest)
    return dest


def unpack(archive: Path, directory: Path) -> None:
    """Extract the plain files at the top of a tar archive; everything else in it is refused.

    Raises:
        ArtError: the archive is broken, or has links, devices, folders or paths.
    """
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                plain = Path(member.name.removeprefix("./")).name
                if not member.isfile() or plain != member.name.removeprefix("./"):
                    raise ArtError(
                        f"The adapter's archive holds {member.name!r}, expected plain files only; "
                        "nothing was extracted"
                    )
                source = tar.extractfile(member)
                assert source is not None  # isfile() holds
                with source, (directory / plain).open("xb") as target:
                    shutil.copyfileobj(source, target)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ArtError(f"The adapter's archive cannot be read: {error}") from error

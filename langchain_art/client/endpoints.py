"""The server's HTTP API: every operation once, for the blocking and the async client.

An operation makes a `Request`, or a `Flow`: a generator that yields requests and receives their
answers. The client that it is a method of sends them.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from langchain_art import wire
from langchain_art.client.http_request import (
    Flow,
    HasId,
    Request,
    deleted,
    endpoint,
    many,
    pages,
    path_of,
    post_group,
    run_path,
    stored_of,
    version_path,
)
from langchain_art.client.job_endpoints import JobEndpoints
from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire.api_keys import DEFAULT_TENANT, RunKey


class Endpoints(JobEndpoints):
    """The operations, as methods that both clients have.

    What an operation is annotated to return in brackets is what `ArtClient` returns, and
    `AsyncArtClient` returns when it is awaited.
    """

    @endpoint
    def ready(self, timeout: float | None = None) -> Request[None]:
        """Wait until the server can sample and train.

        Args:
            timeout: seconds after which to raise. None: the client's `patience`, and ten seconds if
                the server never answered.
        """
        return Request("GET", "/readyz", lambda _: None, patience=timeout, quick=True)

    @endpoint
    def status(self) -> Request[wire.ServerStatus]:
        """The server's model, policies, engines and counts."""
        return Request("GET", "/status", wire.ServerStatus)

    @endpoint
    def models(self) -> Request[list[str]]:
        """Names that `model=` may have: the base model, policies and their versions."""
        return Request("GET", "/v1/models", lambda b: [one["id"] for one in json.loads(b)["data"]])

    @endpoint
    def create_policy(
        self, name: str, lora: wire.LoraConfig | None = None
    ) -> Request[wire.PolicyStatus]:
        """Make a policy. The same call again changes nothing; another `lora` raises Conflict."""
        spec = wire.PolicySpec(name=name, lora=lora or wire.LoraConfig())
        return Request("POST", "/v1/policies", wire.PolicyStatus, body=spec)

    @endpoint
    def policies(self) -> Request[list[wire.PolicyStatus]]:
        """All policies."""
        return Request("GET", "/v1/policies", many(wire.PolicyStatus))

    @endpoint
    def policy(self, name: str) -> Request[wire.PolicyStatus]:
        """One policy. Raises NotFound."""
        return Request("GET", path_of("policies", name), wire.PolicyStatus)

    @endpoint
    def delete_policy(self, name: str) -> Request[str]:
        """Delete a policy with all its versions; returns its name.

        Raises Conflict if a job or a call uses it.
        """
        return Request("DELETE", path_of("policies", name), deleted)

    @endpoint
    def checkpoints(self, policy: str) -> Request[list[wire.Checkpoint]]:
        """The versions of a policy that the server keeps."""
        return Request("GET", path_of("policies", policy, "checkpoints"), many(wire.Checkpoint))

    @endpoint
    def pin(self, policy: str, version: int) -> Request[wire.Checkpoint]:
        """Keep a version from being pruned."""
        return Request("PUT", version_path(policy, version, "pin"), wire.Checkpoint)

    @endpoint
    def unpin(self, policy: str, version: int) -> Request[wire.Checkpoint]:
        """Allow a version to be pruned again."""
        return Request("DELETE", version_path(policy, version, "pin"), wire.Checkpoint)

    @endpoint
    def rollback(self, policy: str, version: int, why: str = "") -> Request[wire.PolicyStatus]:
        """Route the policy's name to an earlier version.

        What that takes out of service is shown with `why` (`Checkpoint.rolled_back`).
        """
        path, body = path_of("policies", policy, "rollback"), {"version": version, "why": why}
        return Request("POST", path, wire.PolicyStatus, body=body)

    @endpoint
    def delete_checkpoint(self, policy: str, version: int) -> Request[str]:
        """Delete a version; returns its name. Raises Conflict if it is in use."""
        return Request("DELETE", version_path(policy, version), deleted)

    @endpoint
    def download_adapter(self, policy: str, version: int, dest: str | Path) -> Flow[Path]:
        """Download a version in PEFT's format to the new directory `dest`, or raise."""
        return downloading(version_path(policy, version, "adapter"), Path(dest))

    @endpoint
    def post_trajectory(self, trajectory: wire.Trajectory) -> Request[bool]:
        """Store a trajectory; False if it was stored before. Raises Conflict if it differs."""
        return Request("POST", "/v1/trajectories", lambda b: bool(stored_of(b)), body=trajectory)

    @endpoint
    def post_groups(self, groups: Sequence[wire.TrajectoryGroup]) -> Flow[int]:
        """Store groups; returns how many of their trajectories were new."""
        stored = 0
        for group in groups:
            stored += yield from post_group(group)
        return stored

    @endpoint
    def trajectories(
        self, limit: int = 100, scenario: str | None = None, *, prefix: str | None = None
    ) -> Flow[list[wire.Trajectory]]:
        """Stored trajectories, newest first; as many pages as `limit` takes.

        Args:
            limit: the most that are wanted.
            scenario: only those of this scenario.
            prefix: only those whose id begins so.
        """
        params = {"scenario": scenario, "prefix": prefix}
        return pages("/v1/trajectories", wire.Trajectory, params, limit)

    @endpoint
    def trajectory(self, run: HasId | str) -> Request[wire.Trajectory]:
        """One stored trajectory, by a run or its id. Raises NotFound."""
        return Request("GET", run_path(run), wire.Trajectory)

    @endpoint
    def delete_trajectory(self, run: HasId | str) -> Request[str]:
        """Delete a run, and its calls but for those that another run has; returns its id.

        Raises Conflict if a job that has not ended uses it.
        """
        return Request("DELETE", run_path(run), deleted)

    @endpoint
    def reward(
        self,
        run: HasId | str,
        reward: float | wire.Reward | None = None,
        turns: Mapping[str, float] | None = None,
    ) -> Request[wire.Trajectory]:
        """Score a trajectory, or the calls that were tagged with its id.

        Args:
            run: a stored run, its id, or the tag of calls (``trajectory_id``).
            reward: of the whole run, or a `Reward` with more fields. None: unchanged.
            turns: call id -> reward of that call alone.

        Raises:
            ConfigError: a reward is not a finite number.
            RequestRefused: the trajectory is not known (`NotFound`), has no such call
                (`InvalidRequest`), or was trained on with another reward (`Conflict`).
        """
        given = reward.model_dump(exclude_unset=True) if isinstance(reward, wire.Reward) else {}
        if reward is not None and not isinstance(reward, wire.Reward):
            given["reward"] = reward
        if turns:
            given["turns"] = dict(turns)
        try:
            body = wire.Reward(**given)
        except ValidationError as error:
            raise ConfigError(f"This is no reward: {error}") from error
        return Request("PUT", run_path(run, "reward"), wire.Trajectory, body=body)

    @endpoint
    def audit(
        self,
        run: HasId | str,
        policy: str | None = None,
        trainable: Mapping[str, bool] | None = None,
        *,
        sft: bool = False,
    ) -> Request[wire.TrajectoryAudit]:
        """Show which of a run's tokens are trained, turn by turn, and why others are excluded.

        Args:
            run: a stored run, or its id.
            policy: the policy that is trained. None: the one that sampled the calls.
            trainable: which calls learn (`Turn.learns`). None: all.
            sft: audit a supervised step (`sft`) instead of training on the reward.

        Raises:
            NotFound: no such trajectory.
        """
        chosen = [f"{name}:{str(learns).lower()}" for name, learns in (trainable or {}).items()]
        params = {"policy": policy, "trainable": chosen, "sft": "true" if sft else None}
        return Request("GET", run_path(run, "audit"), wire.TrajectoryAudit, params)

    @endpoint
    def call(self, call_id: str) -> Request[dict[str, Any]]:
        """The server's record of one completion: token ids, logprobs, tags and the model."""
        return Request("GET", path_of("calls", call_id), json.loads)

    @endpoint
    def put_reviews(self, reviews: Sequence[wire.Review]) -> Flow[wire.ReviewsKept]:
        """Keep what people said of runs and calls; any number of reviews, each id once.

        Idempotent by source and id: of two revisions the later one holds (`Review.at`). Those of a
        run or a call that the server does not know are refused, and the answer names them.
        """
        counts: Counter[str] = Counter()
        refused: list[wire.RefusedReview] = []
        trained: dict[str, tuple[str, ...]] = {}
        for start in range(0, len(reviews), wire.MAX_REVIEWS):
            some = wire.Reviews(reviews=tuple(reviews[start : start + wire.MAX_REVIEWS]))
            kept = yield Request("PUT", "/v1/reviews", wire.ReviewsKept, body=some)
            counts.update(kept.model_dump(exclude={"refused", "trained"}))
            refused += kept.refused
            trained |= kept.trained
        return wire.ReviewsKept(**counts, refused=tuple(refused), trained=trained)

    @endpoint
    def reviews(
        self,
        *,
        policy: str | None = None,
        run: HasId | str | None = None,
        source: str | None = None,
    ) -> Flow[list[wire.Review]]:
        """List reviews in the order in which they first came; as many pages as it takes.

        Args:
            policy: only of runs that have a call of this policy.
            run: only of this run and its calls.
            source: only from this source (`Review.source`).
        """
        trajectory = run if run is None or isinstance(run, str) else run.id
        params = {"policy": policy, "trajectory": trajectory, "source": source}
        return pages("/v1/reviews", wire.Review, params)

    @endpoint
    def foresee_reviews(self, runs: Sequence[str]) -> Flow[dict[str, wire.VerdictFate]]:
        """Foresee, by run's id, what a verdict on it would do: ``trains``, or what prevents it.

        Args:
            runs: ids of any number of runs; those that are not stored are not in the answer.
        """
        found: dict[str, wire.VerdictFate] = {}
        for start in range(0, len(runs), 1000):
            body = wire.RunsToReview(runs=tuple(runs[start : start + 1000]))
            found |= yield Request("POST", "/v1/reviews/foresee", json.loads, body=body)
        return found

    @endpoint
    def create_key(
        self,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        scopes: Sequence[wire.Scope] = ("infer", "submit", "review"),
        limits: wire.KeyLimits | None = None,
        expires_at: float | None = None,
    ) -> Request[wire.NewApiKey]:
        """Make a key; the answer alone has the key itself.

        Args:
            name: for people: whose it is, or what for.
            tenant: whose runs, policies, calls and jobs it reaches; a new name is a new tenant.
            scopes: what it may do.
            limits: how much. None: no limits but the server's own.
            expires_at: seconds since the epoch from which on it is refused. None: never.

        Raises:
            ConfigError: a value is not valid.
            PermissionDenied: this client's key is not the administrator's.
        """
        spec = wire.KeySpec(
            name=name,
            tenant=tenant,
            scopes=tuple(scopes),
            limits=limits or wire.KeyLimits(),
            expires_at=expires_at,
        )
        return Request("POST", "/v1/keys", wire.NewApiKey, body=spec)

    def run_key(self, run: str, *, seconds: float = 3600.0) -> str:
        """A key of one run, for a program that can set nothing but its key and its base URL.

        Its model calls are calls of the run, as with the run in the URL
        (``…/v1/runs/RUN``), and it may do nothing else. It is made here, of the client's key.

        Args:
            run: the trajectory's id.
            seconds: until it is refused.
        """
        return RunKey.of(self.api_key or "", run, time.time() + seconds).text

    @endpoint
    def api_keys(self) -> Request[list[wire.ApiKey]]:
        """All keys that were ever made, oldest first, without the keys themselves."""
        return Request("GET", "/v1/keys", many(wire.ApiKey))

    @endpoint
    def revoke_key(self, key_id: str) -> Request[wire.ApiKey]:
        """Revoke a key from now on. Raises NotFound."""
        return Request("DELETE", path_of("keys", key_id), wire.ApiKey)

    @endpoint
    def actions(self, limit: int | None = 100) -> Flow[list[wire.LoggedAction]]:
        """List who trained, rolled back, deleted, reviewed, made and revoked keys: newest first.

        Args:
            limit: the most that are wanted. None: all.
        """
        return pages("/v1/log", wire.LoggedAction, {}, limit)


def downloading(path: str, dest: Path) -> Flow[Path]:
    """Download the archive at `path` into `dest`, which is made complete or not at all."""
    with new_folder(dest) as made:
        archive = made.with_suffix(".tar")
        yield Request("GET", path, lambda _: None, save=archive)
        made.mkdir()
        unpack(archive, made)
    return dest


@contextmanager
def new_folder(dest: Path) -> Generator[Path, None, None]:
    """A path to make a folder at, which is `dest` then; what is beside it goes.

    Raises ConfigError if `dest` is there and not empty, or cannot be written.
    """
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError(f"{dest} exists and is not empty; choose another directory")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}-")
    except OSError as error:
        raise ConfigError(f"{dest} cannot be written: {error}") from error
    with beside as temporary:
        made = Path(temporary) / "made"
        yield made
        if dest.exists():
            dest.rmdir()
        made.rename(dest)


def unpack(archive: Path, directory: Path) -> None:
    """Extract the plain files at the top of a tar archive.

    Raises ArtError if it is broken, compressed (its size says nothing of what comes out of it), or
    has anything else: links, devices, folders, paths or files with holes.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                plain = Path(name).name
                if not member.isfile() or member.issparse() or plain != name:
                    raise ArtError(
                        f"The adapter's archive holds {member.name!r}, expected plain files only; "
                        "nothing was extracted"
                    )
                source = tar.extractfile(member)
                assert source is not None  # isfile() holds
                with source, (directory / plain).open("xb") as target:
                    shutil.copyfileobj(source, target)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise ArtError(f"The adapter's archive cannot be read: {error}") from error

"""Fits as their folders tell of them: for `langchain-art fits`, `curve` and `eval`.

Of two with one seed: the first call, token, reward, metric or weight in which they are not equal.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from langchain_art._notebook import view_html
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.training import fit_state
from langchain_art.training.records import StepRecord
from langchain_art.training.report import summary_view
from langchain_art.wire import Trajectory, Turn

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Fit(fit_state.FitRecords):
    """A fit that runs, was stopped or is finished."""

    name: str
    """Name of its folder, below the folder that was searched."""
    state: fit_state.FitState
    at: float
    """Seconds since the epoch: when its files were last written."""
    running: bool

    def _repr_html_(self) -> str:
        return view_html("training.fits:stored_view", self)

    @property
    def words(self) -> str:
        """``finished``, ``running`` or ``stopped``."""
        return "running" if self.running else "finished" if self.finished else "stopped"

    @property
    def finished(self) -> bool:
        """True if all steps that were asked for are done (or it ended early), and evaluated."""
        ended = self.state.finished > 0 and bool(self.state.stopped)
        return ended or 0 < self.state.steps <= self.state.finished

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """(step, mean reward): held out if it was ever evaluated, else of the training batches."""
        held_out = [(e.step or 0, e.mean) for e in self.evals if e.mean is not None]
        return held_out or [
            (record.step, record.reward_mean)
            for record in self.steps
            if record.reward_mean is not None
        ]

    @property
    def held_out(self) -> bool:
        """True if `rewards` are those of held-out scenarios."""
        return any(e.mean is not None for e in self.evals)

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, mean reward) of the best, the earliest of equals."""
        return max(self.rewards, key=lambda one: (one[1], -one[0]), default=None)

    @property
    def use(self) -> str:
        """Versions to use: the best, or where it was not evaluated the newest."""
        if self.best is not None and self.held_out:
            return next(e.version for e in self.evals if (e.step or 0, e.mean) == self.best)
        serving, policies = self.state.began_with | self.versions, self.state.identity.policies
        return " + ".join(f"{name}@{serving.get(name, 0)}" for name in policies)


def stored_view(fit: Fit) -> Group:
    """A fit as a notebook shows it: its name, its state, and the summary of its files."""
    after = fit.eval_at(fit.done) if fit.done else None
    result = fit.result(fit.state, fit.versions).model_copy(update={"after": after})
    return Group(Text(f"{fit.name}: {fit.words}"), summary_view(result))


def read_fits(root: Path) -> list[Fit]:
    """The fits below a folder, the latest last; without those that a fresh one moved aside.

    One that cannot be read is left out, with a warning.
    """
    fits: list[Fit] = []
    for path in root.rglob(fit_state.FIT):
        if "earlier" in path.relative_to(root).parts:
            continue
        try:
            fits += filter(None, [_read(path.parent, root)])
        except ConfigError as error:
            log.warning("A fit is left out. %s", error)
    return sorted(fits, key=lambda fit: fit.at)


def chosen_fits(root: Path, names: Sequence[str]) -> list[Fit]:
    """The fits of these names, in their order; all if there is no name. Raises ConfigError."""
    known = {fit.name: fit for fit in read_fits(root)}
    if not known:
        raise ConfigError(
            f"There is no fit below {root}. A Trainer writes one there: Trainer(name=…) to "
            f"{root}/NAME. Search another folder with --root."
        )
    chosen: list[Fit] = []
    for name in names:
        moved = _read(root / name, root)  # also one in `earlier`
        if moved is None:
            raise ConfigError(
                f"got the fit {name!r}, expected one of those below {root}: {', '.join(known)}"
            )
        chosen.append(moved)
    return chosen or list(known.values())


def latest_of(root: Path, policy: str) -> Fit | None:
    """The latest fit of a policy below a folder, if there is one."""
    of_policy = [fit for fit in read_fits(root) if policy in fit.state.identity.policies]
    return of_policy[-1] if of_policy else None


def _read(folder: Path, root: Path) -> Fit | None:
    state = fit_state.read_state(folder / fit_state.FIT, fit_state.FitState)
    if state is None:
        return None
    lines = folder / fit_state.HISTORY
    fit = Fit(
        name=(folder.relative_to(root) if folder.is_relative_to(root) else folder).as_posix(),
        state=state,
        running=fit_state.is_running(folder),
        at=max(path.stat().st_mtime for path in (folder / fit_state.FIT, lines) if path.exists()),
    )
    for record in fit_state.read_records(lines) if lines.exists() else ():
        fit.keep(record)
    return fit


#: Ends of the names of metrics that measure the machine.
_OF_THE_MACHINE = ("seconds", "bytes")


@dataclass
class FitComparison:
    """The first difference of two fits, and the calls and tokens before it, which are equal."""

    first: str | None = None
    """First difference, and both values; None: there is none."""
    calls: int = 0
    tokens: int = 0
    adapters: str = ""
    """Names and digests of the latest versions of both that the server keeps."""

    def __str__(self) -> str:
        same = f"{self.calls} calls, {self.tokens} tokens"
        if self.first is None:
            return f"equal: {same}, adapters {self.adapters or 'not kept'}"
        return f"{self.first} (equal before: {same})"


@dataclass(frozen=True)
class _Side:
    fit: Fit
    client: ArtClient

    def weights(self, policy: str, version: int) -> bytes | None:
        """The adapter of a version; None: it is not kept."""
        if version not in {one.version for one in self.client.checkpoints(policy)}:
            return None
        with tempfile.TemporaryDirectory(prefix="langchain-art-diff-") as folder:
            path = self.client.download_adapter(policy, version, Path(folder) / "adapter")
            return (path / "adapter_model.safetensors").read_bytes()

    def calls(self, run: Trajectory) -> list[tuple[Turn, dict[str, Any]]]:
        return [
            (turn, self.client.call(turn.call_id))
            for turn in run.turns
            if turn.ours and turn.call_id
        ]


def compare_fits(
    first: Fit, second: Fit, client: ArtClient, others: ArtClient | None = None
) -> FitComparison:
    """Compare two fits with one seed step by step: runs with their calls, metrics, weights.

    `others` is of the second fit's server, if that is another one. Raises ConfigError if their
    seeds differ, NotFound if a run or a call is no longer stored.
    """
    seeds = [one.state.identity.seed for one in (first, second)]
    if seeds[0] != seeds[1]:
        raise ConfigError(
            f"got fits with the seeds {seeds[0]} and {seeds[1]}, expected one seed: with two, the "
            "first token is another already"
        )
    found, sides = FitComparison(), (_Side(first, client), _Side(second, others or client))
    found.first = next(_differences(found, *sides), None)
    return found


def _differences(found: FitComparison, one: _Side, other: _Side) -> Iterator[str]:
    for a, b in zip_longest(one.fit.steps, other.fit.steps):
        if a is None or b is None:
            ended = one if a is None else other
            yield f"{ended.fit.name} has ended after step {ended.fit.done}, the other has not"
            return
        yield from _runs(found, a, b, one, other)
        yield from _trained(found, a, b, one, other)
    for a, b in zip_longest(one.fit.evals, other.fit.evals):
        yield from _unequal("evaluation", a and (a.step, a.mean), b and (b.step, b.mean))


def _runs(
    found: FitComparison, a: StepRecord, b: StepRecord, one: _Side, other: _Side
) -> Iterator[str]:
    step = f"step {a.step}"
    for number, ids in enumerate(zip_longest(a.run_ids, b.run_ids, fillvalue=()), 1):
        yield from _unequal(f"{step}, group {number}, runs", *map(len, ids))
        for member, (left, right) in enumerate(zip(*ids, strict=True)):
            mine, theirs = one.client.trajectory(left), other.client.trajectory(right)
            where = f"{step}, scenario {mine.scenario!r}, member {member}"
            yield from _unequal(f"{where}, scenario", mine.scenario, theirs.scenario)
            calls = other.calls(theirs)
            for place, (turn, call) in enumerate(one.calls(mine)):
                at = f"{where}, node {turn.label}, call {place}"
                twin = _twin(call, calls)
                if twin is None:
                    yield f"{at}: {other.fit.name} has no such call"
                    return
                their_turn, their_call = calls.pop(twin)
                yield from _call(at, call, their_call)
                yield from _unequal(f"{at}, reward", turn.reward, their_turn.reward)
                found.calls += 1
                found.tokens += len(call["token_ids"])
            for turn, _ in calls:
                yield f"{where}, node {turn.label}: {one.fit.name} has no such call"
            yield from _unequal(f"{where}, status", mine.status, theirs.status)
            yield from _unequal(f"{where}, reward", mine.reward, theirs.reward)


def _twin(call: Mapping[str, Any], calls: list[tuple[Turn, dict[str, Any]]]) -> int | None:
    """The place in `calls` of the one with this call's seed; if none has it, 0; None: none is left.

    The seed is of the nodes and messages: parallel branches call in any order.
    """
    seed = call["request"].get("seed")
    same = [place for place, (_, one) in enumerate(calls) if one["request"].get("seed") == seed]
    return next(iter([*same, *range(len(calls))]), None)


def _call(at: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    asked, why = one["request"], ""
    for name in dict.fromkeys([*asked, *other["request"]]):
        values = asked.get(name), other["request"].get(name)
        if name not in ("messages", "model", "seed") and values[0] != values[1]:
            why += f"; its {name} is {values[0]!r} and {values[1]!r}"
    names = {"prompt_token_ids": "prompt token", "token_ids": "token", "logprobs": "logprob"}
    for field, name in names.items():
        for place, (a, b) in enumerate(zip_longest(one[field], other[field])):
            for words in _unequal(f"{at}, {name} {place}", a, b):
                yield words + why


def _trained(
    found: FitComparison, a: StepRecord, b: StepRecord, one: _Side, other: _Side
) -> Iterator[str]:
    yield from _unequal(f"step {a.step}, policies trained", len(a.results), len(b.results))
    digests: list[str] = []
    for (policy, mine), (theirs, result) in zip(a.results.items(), b.results.items(), strict=True):
        where = f"step {a.step}, {policy}"
        for name in dict.fromkeys([*mine.metrics, *result.metrics]):
            if not name.endswith(_OF_THE_MACHINE):
                values = mine.metrics.get(name), result.metrics.get(name)
                yield from _unequal(f"{where}, {name}", *values)
        left, right = one.weights(policy, mine.version), other.weights(theirs, result.version)
        if left is None or right is None:
            continue
        yield from _tensors(where, _tensors_of(left), _tensors_of(right))
        digests.append(f"{policy}@{mine.version} sha256 {hashlib.sha256(left).hexdigest()}")
    found.adapters = ", ".join(digests) or found.adapters


_Tensor = tuple[dict[str, Any], memoryview]


def _tensors_of(file: bytes) -> dict[str, _Tensor]:
    (size,) = struct.unpack("<Q", file[:8])
    header, data = json.loads(file[8 : 8 + size]), memoryview(file)[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: (about, data[slice(*about.pop("data_offsets"))]) for name, about in header.items()
    }


def _tensors(where: str, one: dict[str, _Tensor], other: dict[str, _Tensor]) -> Iterator[str]:
    yield from _unequal(f"{where}, tensors", sorted(one), sorted(other))
    for name in sorted(one):
        (about, left), (known, right) = one[name], other[name]
        yield from _unequal(f"{where}, weight {name}", about, known)
        if left != right:
            size = {"F32": 4, "F16": 2, "BF16": 2}[about["dtype"]]
            starts = range(0, len(left), size)
            start = next(n for n in starts if left[n : n + size] != right[n : n + size])
            a, b = (_number(some[start : start + size], about["dtype"]) for some in (left, right))
            yield f"{where}, weight {name}[{start // size}]: {a!r} and {b!r}"


def _number(value: memoryview, dtype: str) -> float:
    raw = bytes(value)
    return struct.unpack(
        "<e" if dtype == "F16" else "<f", raw if dtype != "BF16" else b"\0\0" + raw
    )[0]


def _unequal(where: str, one: object, other: object) -> Iterable[str]:
    return [] if one == other else [f"{where}: {one!r} and {other!r}"]

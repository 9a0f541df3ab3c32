"""A real fit, tracked: read back with each tracker's own reader; and trackers that cannot work."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_art.tracing.scope import capture
from langchain_art.trackers.choice import KNOWN
from langchain_art.trackers.tracker_thread import FitCard, TrackedRecord, TrackerRun, TrackerThread
from langchain_art.trackers.wandb_tracker import WandbTracker
from langchain_art.training.records import FitResult
from langchain_art.wire import TrainConfig
from tests.support.chat_models import model_of
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import said, trainer_of


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a tracker is written outside of the test's folder."""
    for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name.lower()))
        (tmp_path / name.lower()).mkdir()
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    yield
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # its settings are read from the environment once a process


def inspected(part: Path) -> list[dict[str, Any]]:
    """The records of an offline run, by W&B's own reader: what `wandb leet inspect` starts."""
    from wandb.util import get_core_path

    [file] = part.glob("run-*.wandb")
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    command += ["--run-file", str(file), str(part.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one[kind] for one in records if one["type"] == kind]


def test_a_fit_and_its_resume_are_read_back(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    policy = new_id("tracked")
    model = model_of(art_server, policy)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "agents")

    async def rollout(scenario: str) -> Any:
        with capture(scenario=scenario) as run:
            reply = await model.ainvoke(scenario)
            run.reward, run.scores = len(reply.text) % 7 / 7, {"short": 1.0}
        return run

    def fit(steps: int) -> tuple[FitResult, str]:
        names = ["wandb", "tensorboard", "trackio"]
        config = TrainConfig(learning_rate=1e-3)
        trainer = trainer_of(art_server, tmp_path / "fit", policy, config=config, trackers=names)
        fitted = trainer.fit_sync(rollout, ["a", "b"], steps=steps, eval_scenarios=["c", "d"])
        return fitted, said(trainer)

    (_, first), (result, told) = fit(1), fit(2)
    assert [one.step for one in result.history] == [1, 2]
    history = (tmp_path / "fit" / "history.jsonl").read_text().splitlines()
    means = {"eval": "mean", "step": "reward_mean"}
    expected = [(r["step"], r["kind"], r[means[r["kind"]]]) for r in map(json.loads, history)]

    # W&B: two parts of one run, which have each record once.
    parts = sorted((tmp_path / "dir" / "wandb").glob("offline-run-*"))
    assert len(parts) == 2, (first, told)
    assert f"wandb sync {parts[0]} {parts[1]}" in told
    read = [inspected(part) for part in parts]
    runs = [of_kind(records, "run")[0] for records in read]
    assert {one["run_id"] for one in runs} == {result.fit_id}
    assert {(one["project"], one["display_name"]) for one in runs} == {("agents", "fit")}
    shown = [one["item"] for records in read for one in of_kind(records, "history")]
    assert [one["_step"] for one in shown] == list(range(len(expected)))
    kinds = [("eval" if "val/reward" in one else "step", one) for one in shown]
    rewards = {"eval": "val/reward", "step": "train/reward"}
    found = [(one["training_step"], kind, one[rewards[kind]]) for kind, one in kinds]
    assert found == expected
    steps = [one for one in shown if "train/reward" in one]
    for one in steps:
        assert {"loss/train", "loss/grad_norm", "train/score_short", "time/rollout_s"} <= set(one)
    axes = {one.get("glob_name", one.get("name")): one for one in of_kind(read[0], "metric")}
    assert axes["*"]["step_metric"] == "training_step"
    table = json.loads((parts[0] / "files" / steps[0]["runs.path"]).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len(rows) == 8 and {row["scenario"] for row in rows} == {"a", "b"}
    mean = sum(row["reward"] for row in rows) / 8
    assert mean == pytest.approx(steps[0]["train/reward"])
    table = json.loads((parts[0] / "files" / steps[0]["actions.path"]).read_text())
    assert {row[table["columns"].index("model")] for row in table["data"]} == {f"{policy}@0"}
    adapters = [one for one in of_kind(read[1], "artifact") if one["type"] == "lora"]
    assert adapters and {one["name"] for one in adapters} == {policy}
    last = next(one for one in adapters if "last" in one["aliases"])
    assert "v2" in last["aliases"] and json.loads(last["metadata"])["version"] == 2
    files = {one["path"] for one in last["manifest"]["contents"]}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files

    # TensorBoard and Trackio, through accelerate: one run each.
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from trackio.sqlite_storage import SQLiteStorage

    assert set(LOGGER_TYPE_TO_CLASS) == set(KNOWN), "accelerate has others now"
    (board,) = (tmp_path / "fit" / "tensorboard").iterdir()
    events = EventAccumulator(str(board)).Reload()
    of_steps = [(step, mean) for step, kind, mean in expected if kind == "step"]
    assert {e.step: e.value for e in events.Scalars("train/reward")} == pytest.approx(
        dict(of_steps)
    )
    assert len(events.Scalars("train/reward")) == len(of_steps)
    (name,) = SQLiteStorage.get_runs("langchain-art")
    logged = SQLiteStorage.get_logs("langchain-art", name)
    steps = [one for one in logged if "train/reward" in one]
    assert [(one["step"], one["train/reward"]) for one in steps] == of_steps


def test_wandb_without_its_server_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An online run whose server refuses: W&B's files have all of it, and one line says so."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("langchain_art.trackers.wandb_tracker._INIT_TIMEOUT", 1.0)
    said: list[str] = []
    card = FitCard("abc123", "fit", tmp_path / "fit", {"seed": 0})
    may_begin, start = threading.Event(), WandbTracker.start

    def start_later(tracker: WandbTracker, *given: Any) -> TrackerRun:
        assert may_begin.wait(60), "the fit waits"
        return start(tracker, *given)

    monkeypatch.setattr(WandbTracker, "start", start_later)
    thread = TrackerThread(WandbTracker(mode="online"), card, [], said.append)
    for number in range(3):
        thread.put(TrackedRecord(number, number, {"train/reward": number / 4}))
    may_begin.set()
    thread.put(None)
    said.append(thread.outcome(60))
    assert "offline, because online: CommError" in said[-1] and "wandb: records: 3" in said[-1]
    (part,) = (tmp_path / "dir" / "wandb").glob("offline-run-*")
    shown = [one["item"] for one in of_kind(inspected(part), "history")]
    assert [one["train/reward"] for one in shown] == [0.0, 0.25, 0.5]

import json
from typing import Any

from langchain_art.training.records import EvalResult, StepRecord
from langchain_art.training.tracking import (
    MOST_ACTIONS,
    MOST_RUNS,
    MOST_TEXT,
    action_rows,
    run_rows,
    tracked,
)
from langchain_art.wire import NodeReport, TrainResult, Trajectory, TrajectoryGroup, Turn, Usage

KEY = "sk-abcdefghijklmnopqrstuv"


def turn(index: int = 0, **more: Any) -> Turn:
    calls = [{"id": "x", "function": {"name": "search", "arguments": f'{{"k": "{KEY}"}}'}}]
    return Turn(
        call_id=f"c{index}",
        node="model",
        model="p@3",
        reply={"role": "assistant", "content": "found it", "tool_calls": calls},
        usage=Usage(prompt_tokens=30, completion_tokens=4),
        latency=0.5,
        **more,
    )


def run(name: str, reward: float | None = 1.0, turns: int = 2, **more: Any) -> Trajectory:
    given = tuple(turn(index) for index in range(turns))
    return Trajectory(id=name, scenario="q", reward=reward, turns=given, **more)


def step() -> StepRecord:
    node = NodeReport(calls=2, tokens=64, advantage_mean=0.0, advantage_abs=0.5, excluded={})
    learned = TrainResult(
        policy="p",
        version=3,
        metrics={"loss": 0.25, "grad_norm": 2.0, "tokens_trained": 64.0, "swap_seconds": 0.1},
        excluded={"groups.zero_variance": 1},
        nodes={"model": node},
    )
    return StepRecord(
        step=3,
        results={"p": learned},
        reward_mean=0.5,
        reward_std=None,
        groups=4,
        failed=1,
        node_rewards={"model": 0.75},
        seconds={"rollout": 2.0, "train": 4.0, "total": 6.0},
        tokens={"prompt": 100, "completion": 50, "trained": 64},
    )


def test_a_step_has_the_conventional_names() -> None:
    runs = (
        run("a", scores={"polite": 1.0}),
        run("b", 0.0, scores={"polite": 0.5}),
        run("c", None, turns=0, status="failed", error="boom"),
        run("d", 0.5, status="truncated"),
    )
    found = tracked(step(), 7, [TrajectoryGroup(id="g", trajectories=runs)])
    assert (found.number, found.step) == (7, 3)
    expected = {
        "train/reward": 0.5,
        "train/frac_groups_zero_std": 0.25,
        "train/score_polite": 0.75,
        "train/exception_rate": 0.25,
        "train/truncated_frac": 0.25,
        "train/turns_mean": 1.5,
        "train/completion_tokens_mean": 6.0,
        "loss/train": 0.25,
        "loss/grad_norm": 2.0,
        "data/tokens_trained": 64.0,
        "data/runs": 4.0,
        "time/rollout_s": 2.0,
        "time/total_s": 6.0,
        "time/swap_s": 0.1,
        "throughput/actor_tok_s": 25.0,
        "throughput/trainer_tok_s": 16.0,
        "excluded/groups.zero_variance": 1.0,
        "nodes/model/reward": 0.75,
        "nodes/model/tokens_trained": 64.0,
    }
    assert {name: found.metrics.get(name) for name in expected} == expected
    assert "train/reward_std" not in found.metrics, "what is not known is left out"
    assert all(type(value) is float for value in found.metrics.values())
    assert "data/runs" not in tracked(step(), 7).metrics


def test_an_evaluation_is_val() -> None:
    record = EvalResult(
        step=4, versions=("p@4",), mean=0.75, ci95=0.1, n=8, failed=1, node_rewards={"model": 0.5}
    )
    found = tracked(record, 0)
    assert found.step == 4 and found.tables == {}
    assert (found.metrics["val/reward"], found.metrics["val/reward_ci95"]) == (0.75, 0.1)
    assert found.metrics["val/nodes/model/reward"] == 0.5
    assert "costs/judge_usd" not in found.metrics


def test_tables_are_capped_and_every_group_is_in_them() -> None:
    groups = [
        TrajectoryGroup(id=f"g{g}", trajectories=tuple(run(f"{g}-{i}") for i in range(8)))
        for g in range(12)
    ]
    tables = tracked(step(), 0, groups).tables
    shown = [row["run"] for row in tables["runs"]]
    assert len(shown) == MOST_RUNS
    assert shown[:13] == [*(f"{g}-0" for g in range(12)), "0-1"]
    assert len(action_rows([run(f"r{i}", turns=9) for i in range(16)])) == MOST_ACTIONS


def test_cells_have_no_secret_and_an_end() -> None:
    long = run("a", input={"messages": [{"role": "user", "content": f"my key is {KEY}"}]})
    long = long.model_copy(update={"output": "x" * (MOST_TEXT + 7)})
    rows: Any = [*run_rows([long]), *action_rows([long])]
    assert KEY not in json.dumps(rows) and "[redacted]" in rows[0]["input"]
    assert rows[0]["output"].endswith("… (7 more characters)")
    assert (rows[0]["prompt_tokens"], rows[0]["last_reply"]) == (60, "found it")
    assert (rows[1]["tools"], rows[1]["node"], rows[1]["seconds"]) == ("search", "model", 0.5)

"""The deep agent: a fit in which it is said what its calls learned; a hosted model in its place."""

from collections import defaultdict
from pathlib import Path

import pytest

from examples.deep_agent.train import DEMO, told
from tests.support.examples import server_of, short_fit, steps_of
from tests.support.soak import count, share

AGENTS, WHEN = {"model", "tools/model"}, ("before", "after")


@pytest.mark.slow
@pytest.mark.soak("D1", 30, "steps of the deep agent's demo")
@pytest.mark.timeout(count(300, 3600))
def test_its_calls_learn_and_it_is_said_what(tmp_path: Path) -> None:
    steps, sizes = count(1, 30), {"groups_per_step": 2, "group_size": 8, "held_out": 2}
    if share() >= 1:
        sizes = {"groups_per_step": 16, "group_size": 8, "held_out": 200}
    with server_of(DEMO, tmp_path) as server:
        found = short_fit(DEMO, server.base_url, tmp_path / "out", steps, more=told, **sizes)
    nodes = [result[DEMO.policies[0]]["nodes"] for result in steps_of(tmp_path / "out")]
    assert nodes[0].keys() == AGENTS
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in nodes:
        for agent, report in step.items():
            tokens = report["tokens"]
            added = report["calls"], tokens, tokens * report["advantage_mean"]
            sums[agent] = [a + b for a, b in zip(sums[agent], added, strict=True)]
    for agent in AGENTS:
        kinds = [kind for kind in found["calls"] if kind["agent"] == agent]
        assert sum(kind["calls"] for kind in kinds) == sums[agent][0]
        assert sum(kind["tokens"] for kind in kinds) == sums[agent][1]
        worth = sum(kind["tokens"] * kind["advantage"] for kind in kinds)
        assert worth == pytest.approx(sums[agent][2], abs=1e-3 * sums[agent][1])
        assert sum(kind["shares"][-1] for kind in kinds) == pytest.approx(1)
    said = {kind["action"] for kind in found["calls"]}
    assert {"task: one word of it", "task: all of the question", "grep: content"} <= said
    if share() >= 1:
        before, after = (found[when] for when in WHEN)
        assert after["mean"] - after["ci95"] > before["mean"] + before["ci95"]
    figures = [f"{found[when]['mean']:.3f} ± {found[when]['ci95']:.3f}" for when in WHEN]
    print(" → ".join(figures))  # noqa: T201

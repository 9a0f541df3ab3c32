"""`langchain-art analyze` over runs that a real server has."""

import json
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from langchain_art.cli.main import app, main
from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import Trajectory, TrajectoryGroup, Turn
from langchain_art.wire.trajectories import EVALUATION
from tests.support.live_server import LiveServer


def test_runs_of_a_server_are_analyzed_and_compared(
    art_server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = uuid.uuid4().hex[:8]
    runs = [
        Trajectory(
            id=f"{name}-{version}-{i}",
            scenario=name,
            reward=float(i < 2 + version),
            turns=(Turn(node="agent", model=f"{name}-p@{version}", ours=False),),
            metadata={EVALUATION: "x"} if i else {},
        )
        for version in (0, 1)
        for i in range(4)
    ]
    with ArtClient(art_server.base_url) as client:
        client.post_groups([TrajectoryGroup(id=f"g-{name}", trajectories=tuple(runs))])
    options = ["analyze", "--scenario", name, "--base-url", art_server.base_url]
    image = tmp_path / "runs.png"
    done = CliRunner().invoke(app, [*options, "--json", "--plot", str(image)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(one["version"], one["success_rate"]) for one in found["versions"]] == [
        (f"{name}-p@0", 0.5),
        (f"{name}-p@1", 0.75),
    ]
    assert image.exists()
    compared = ["--compare", f"{name}-p@0", "--compare", f"{name}-p@1"]
    done = CliRunner().invoke(app, [*options, *compared, "--held-out", "--limit", "8"])
    assert done.exit_code == 0 and "+0.333" in " ".join(done.stdout.split()), done.output
    assert "newest 8 runs" in done.stdout and "unpaired permutation test" in done.stdout
    with pytest.raises(SystemExit):
        main([*options, "--compare", "one"])
    assert "got --compare 1 times" in capsys.readouterr().err

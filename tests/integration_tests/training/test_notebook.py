"""A fit in a notebook: one output that is redrawn, interrupted as in a terminal, and resumed."""

import re
from pathlib import Path

import pytest

from tests.support.live_server import BASE_MODEL
from tests.support.notebook_kernels import running_kernel
from tests.support.stub_engines import StubServer

#: A server that the notebook starts; any program that answers at /readyz stands for it.
LOCAL = f"""
import pathlib, sys, urllib.request
from langchain_art import LocalServer
pathlib.Path("readyz").touch()
server = LocalServer({str(BASE_MODEL)!r}, data_dir="data")
server._argv = [sys.executable, "-m", "http.server", str(server.port)]
server.start()
"""
BEGIN = """
import random
from langchain_art import ChatART, TrainConfig, Trainer, capture
model = ChatART(model="p", base_url="{url}", max_tokens=8)
async def rollout(question):
    async with capture(scenario=question) as run:
        await model.ainvoke(question)
        run.reward = random.random()
    return run
config = TrainConfig(learning_rate=1e-3)
trainer = Trainer(model, group_size=4, groups_per_step=1, config=config, out_dir="fit")
"""
FIT = "fit = await trainer.fit(rollout, ['one', 'two'], steps={steps}, eval_scenarios=['three'])"


@pytest.mark.slow
def test_a_fit_is_one_output_is_interrupted_after_a_step_and_goes_on_in_a_new_kernel(
    tmp_path: Path,
) -> None:
    with (
        StubServer(tmp_path / "stub" / "data", seconds=(0.2, 0.3)) as server,
        running_kernel(tmp_path) as kernel,
    ):
        begin = BEGIN.format(url=server.base_url)
        assert not kernel.run(LOCAL).error
        assert not kernel.run(begin).error
        refused = kernel.run("trainer.fit_sync(rollout, ['one'], steps=1)").error
        assert "write `await trainer.fit(...)`" in refused[-1]

        stopped = kernel.run(FIT.format(steps=100), lambda html: "step   2/100" in html)
        [line] = stopped.error  # no traceback
        found = re.fullmatch(r"Stopped after step (\d+) of 100\. Run the same again .*", line)
        assert found, line
        assert len(stopped.displays) == 1 and stopped.updates > 2
        assert line in re.sub(r"\s+", " ", stopped.displays[0])
        asked = "urllib.request.urlopen(f'http://127.0.0.1:{server.port}/readyz')"
        assert not kernel.run(f"{asked}; assert server.restarts == 0; server.stop()").error

        kernel.restart()
        assert not kernel.run(begin).error
        steps = int(found[1]) + 1
        resumed = kernel.run(FIT.format(steps=steps))
        assert not resumed.error, resumed.error
        [shown] = resumed.displays
        assert f"Going on after step {found[1]}" in shown and f"p: {steps} steps" in shown
        assert "steps " not in shown.partition("held out after")[0]  # the bars have gone
        assert kernel.run("fit").displays[0].count("held out after") == 1

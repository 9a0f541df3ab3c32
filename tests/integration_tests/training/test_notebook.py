"""A fit in a notebook: one output that is redrawn, interrupted as in a terminal, and resumed."""

import re
from pathlib import Path

import pytest

from tests.support.live_server import BASE_MODEL, REPO, ForkedServer
from tests.support.notebook_kernels import running_kernel

#: Its server is over stub engines: its models are not the subject.
SERVER = f"""
import os
from langchain_art import ArtClient, LocalServer
server = LocalServer({str(BASE_MODEL)!r}, policies=["p"], data_dir="data")
server._argv[2] = "tests.support.stub_engines"
os.environ["STUB_SECONDS"] = "0.2 0.3"
os.environ["PYTHONPATH"] = os.pathsep.join([{str(REPO)!r}, os.environ.get("PYTHONPATH", "")])
server.start()
url = server.base_url
"""
BEGIN = """
import random
from langchain_art import ChatART, TrainConfig, Trainer, capture
model = ChatART(model="p", base_url=url, max_tokens=8)
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
    with running_kernel(tmp_path) as kernel:
        assert not kernel.run(SERVER + BEGIN).error
        refused = kernel.run("trainer.fit_sync(rollout, ['one'], steps=1)").error
        assert "write `await trainer.fit(...)`" in refused[-1]

        stopped = kernel.run(FIT.format(steps=100), lambda html: "step   2/100" in html)
        [line] = stopped.error  # no traceback
        found = re.fullmatch(r"Stopped after step (\d+) of 100\. Run the same again .*", line)
        assert found, line
        assert len(stopped.displays) == 1 and stopped.updates > 2
        assert line in re.sub(r"\s+", " ", stopped.displays[0])
        asked = kernel.run("assert server.restarts == 0; ArtClient(server.base_url).status()")
        assert not asked.error

        kernel.restart()  # its server ends with it
        again = ForkedServer(
            tmp_path / "data",
            *("--policy", "p"),
            model=BASE_MODEL,
            env={"STUB_SECONDS": "0 0"},
            module="tests.support.stub_engines",
        )
        with again:
            assert not kernel.run(f"url = {again.base_url!r}\n{BEGIN}").error
            steps = int(found[1]) + 1
            resumed = kernel.run(FIT.format(steps=steps))
        assert not resumed.error, resumed.error
        [shown] = resumed.displays
        assert f"Going on after step {found[1]}" in shown and f"p: {steps} steps" in shown
        assert "steps " not in shown.partition("held out after")[0]  # the bars have gone
        assert kernel.run("fit").displays[0].count("held out after") == 1

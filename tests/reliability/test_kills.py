"""kill -9 at random moments of a training run: nothing lost, nothing trained twice, to the bit.

Rollouts, a judge, steps by rewards and by preferences, and swaps, on CPU in float32. Calls go out
one after the other. Where many are decoded at once, who shares a batch with whom is a matter of
arrival, and rounding follows it; seeds cannot help there (`test_trainer_kills` has many at once).
"""

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from langchain_art import RulerEvaluator
from langchain_art.wire import Trajectory, TrajectoryGroup, Turn
from tests.support.judges.literal_judge import ScriptedJudge, parse, verdict
from tests.support.live_server import ForkedServer, LiveServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.storms import Killer, Patient, Witness

KILLS, PER_RUN = count(3, 1000), 25
#: The longest pause between a start and the next kill, in seconds: about that of a step.
PAUSE = 1.2
FILES = ("adapter_model.safetensors", "optimizer.safetensors")


def serve(folder: Path, name: str) -> ForkedServer:
    return ForkedServer(folder / name, settings="keep_checkpoints = 1000\n")


def by_what_is_said(request: str) -> str:
    """Scores that are arbitrary, and the same for the same replies: no policy exhausts them."""
    runs = parse(request).runs
    return verdict({run: sum(map(ord, text)) % 11 / 10 for run, text in runs.items()})


class Agent:
    """A client that trains a policy, whatever happens to the server meanwhile."""

    def __init__(self, server: LiveServer) -> None:
        self.patient = Patient(server)
        self._judge = RulerEvaluator(ScriptedJudge(answer=by_what_is_said))
        self.steps = 0
        self.said: list[list[list[int]]] = []
        #: Of every call that was answered: its id and its tokens.
        self.calls: dict[str, list[int]] = {}
        self.runs: list[str] = []

    def step(self) -> None:
        """Sample eight runs, have them judged, store them, and train."""
        self.steps += 1
        self.said.append([])
        groups: list[list[str]] = []
        for question in range(2):
            runs = [self._rollout(question, one) for one in range(4)]
            sent = TrajectoryGroup(id=f"tiny-{self.steps}-{question}", trajectories=runs)
            judged = self._judge.invoke(sent)
            self.patient.ok("POST", "/v1/groups", judged.model_dump(mode="json"))
            groups.append([run.id for run in runs])
            self.runs += groups[-1]
        config: dict[str, Any] = {"learning_rate": 5e-4, "tokens_per_microbatch": 64}
        if self.steps % 5 == 0:
            config["kind"] = "dpo"
            groups = [[chosen, rejected] for chosen in groups[0] for rejected in groups[1]]
        elif self.steps % 2 == 0:
            config["optimizer_steps"] = 4
        body = {"policy": "tiny", "groups": groups, "config": config}
        job = self.patient.train(f"tiny-{self.steps}", body)
        assert job["result"]["version"] == self.steps, job

    def _rollout(self, question: int, one: int) -> Trajectory:
        prompt = [{"role": "user", "content": f"When is the audit? {question}"}]
        seed = 100 * self.steps + 10 * question + one
        body = {"model": "tiny", "messages": prompt, "max_tokens": 24, "temperature": 1.3}
        answer = self.patient.ok("POST", "/v1/chat/completions", body | {"seed": seed})
        call, reply = answer["id"], answer["choices"][0]["message"]
        tokens = self.patient.ok("GET", f"/v1/calls/{call}")["token_ids"]
        self.calls[call] = tokens
        self.said[-1].append(tokens)
        turn = Turn(call_id=call, messages=tuple(prompt), reply={"role": "assistant"} | reply)
        return Trajectory(id=f"tiny-{self.steps}-{question}-{one}", turns=(turn,))

    def version(self, step: int) -> list[bytes]:
        """Adapter and optimizer."""
        folder = self.patient.server.data_dir / "adapters" / "tiny" / str(step)
        return [(folder / name).read_bytes() for name in FILES]

    def nothing_lost(self, witnessed: list[str]) -> None:
        """What was acknowledged is there; each run was trained once, each step was taken once."""
        with self.patient.server.http() as http:
            for call, tokens in self.calls.items():
                assert http.get(f"/v1/calls/{call}").json()["token_ids"] == tokens, call
            for run in [*witnessed, *self.runs]:
                assert http.get(f"/v1/trajectories/{run}").status_code == 200, run
            jobs = http.get("/v1/jobs", params={"limit": 1000}).json()["data"]
        assert [job["result"]["version"] for job in jobs] == list(range(1, self.steps + 1))
        assert {job["state"] for job in jobs} == {"succeeded"}
        trained: list[str] = []
        for step, job in enumerate(jobs, start=1):
            folder = self.patient.server.data_dir / "adapters" / "tiny" / str(step)
            manifest = from_json((folder / "manifest.json").read_bytes())
            assert manifest["job"] == job["id"]
            trained += manifest.get("trained", [])
        assert len(set(trained)) == len(trained) and trained


@pytest.mark.soak("F1", KILLS, "kills")
@pytest.mark.slow
@pytest.mark.timeout(count(600, 14_400))
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_runs_with_kills_end_bit_for_bit_as_the_undisturbed_one(tmp_path: Path) -> None:
    seed, kills, starts = drawn_seed(), list[str](), list[float]()
    with serve(tmp_path, "calm") as quiet:
        calm = Agent(quiet)
        while len(kills) < KILLS:
            draw = random.Random(f"{seed} {len(kills)}")
            stormy = serve(tmp_path, f"stormy-{len(kills)}").start()
            agent = Agent(stormy)
            most = min(PER_RUN, KILLS - len(kills))
            witness = Witness(stormy)
            killer = Killer(stormy, draw, most, PAUSE, lambda: agent.patient.answered)  # noqa: B023
            witness.start()
            killer.start()
            try:
                while killer.is_alive() or not agent.steps:
                    agent.step()
                killer.join()
                assert len(killer.kills) == most
            finally:
                witness.stop.set()
                killer.stop.set()
                killer.join()
            witness.join()
            stormy.kill()
            stormy.start()  # the last word is the disk's
            agent.nothing_lost(witness.acknowledged)
            assert not killer.torn
            while calm.steps < agent.steps:
                calm.step()
            assert agent.said == calm.said[: agent.steps]
            made = [agent.version(step) for step in range(1, agent.steps + 1)]
            for step, version in enumerate(made, start=1):
                assert version == calm.version(step), f"version {step} differs"
            assert len({adapter for adapter, _ in made}) == agent.steps  # each step did something
            kills += killer.kills
            starts += killer.starts
            stormy.stop()
    print(f"{len(kills)} kills; a start takes {statistics.median(starts):.1f} s")  # noqa: T201

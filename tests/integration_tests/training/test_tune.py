"""Learning rates compared by short probes, and a policy that is left as it was."""

from __future__ import annotations

import io
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.email_search.inbox import MailStore, build
from examples.email_search.train import MAX_TOKENS, make_rollout
from langchain_art import ChatART
from langchain_art.cli.main import main
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError, RolloutFailed
from langchain_art.training.trainer import Trainer
from langchain_art.training.tune import RateProbe, chosen, tune_table
from langchain_art.wire import LoraConfig, TrainConfig, default_learning_rate
from tests.support.live_server import LiveServer

SCENARIOS = [{"id": f"q-{i}", "question": f"Say {i}"} for i in range(4)]
ROLLOUT = """
from langchain_art import ChatART

async def rollout(scenario, model):
    reply = await model.bind(max_tokens=4).ainvoke(scenario["question"])
    return sum((reply.text + scenario["id"]).encode()) % 97 / 97
"""


def probe(rate: float, mean: float | None, ci95: float | None = 0.1, why: str = "") -> RateProbe:
    return RateProbe(learning_rate=rate, mean=mean, ci95=ci95, collapsed=why)


def test_the_highest_mean_is_taken_and_said_to_be_clear_only_if_it_is() -> None:
    low, high = probe(1e-4, 0.2), probe(1e-3, 0.8)
    assert chosen([low, high])[:2] == (1e-3, True)
    rate, clear, why = chosen([low, probe(3e-4, 0.7), high])
    assert (rate, clear) == (1e-3, False) and "not clear of 0.700 ± 0.100 (0.0003)" in why
    assert chosen([low, high, probe(1e-2, 0.9, why="fell")])[:2] == (1e-3, True)
    assert chosen([probe(1e-3, 0.5, None), probe(1e-4, 0.5, None)])[:2] == (1e-4, False)
    assert chosen([probe(1e-3, None, None), probe(1e-2, 0.1, why="fell")])[0] is None
    assert "no other rate" in chosen([high])[2]


def test_senseless_rates_are_refused() -> None:
    trainer = Trainer("p", out_dir="nowhere")

    def rollout(_: Any) -> float:
        return 0.0

    for wrong in ([], [0.0], [-1.0], [float("nan")], [0.2], [1e-3, 1e-3]):
        with pytest.raises(ConfigError, match=r"got rates=.*, expected distinct ones above 0"):
            trainer.tune_sync(rollout, SCENARIOS, rates=wrong)
    with pytest.raises(ConfigError, match="got steps=1, expected at least 2"):
        trainer.tune_sync(rollout, SCENARIOS, steps=1)
    with pytest.raises(ConfigError, match="train_scenarios: got none"):
        trainer.tune_sync(rollout, [])


async def test_rates_are_compared_and_the_policy_is_left_as_it_was(
    art_server: LiveServer, tmp_path: Path
) -> None:
    policy, told = f"tuned-{uuid.uuid4().hex[:8]}", io.StringIO()
    mails = MailStore(build(tmp_path / "mails.sqlite3", n_train=16, n_test=4, seed=0))
    model = ChatART(
        model=policy,
        base_url=art_server.base_url,
        api_key=art_server.api_key or "EMPTY",
        max_tokens=MAX_TOKENS,
    )
    trainer = Trainer(
        model,
        group_size=4,
        groups_per_step=2,
        lora=LoraConfig(rank=2, alpha=4.0),
        config=TrainConfig(advantage="standardized"),
        out_dir=tmp_path / "fit",
        console=Console(file=told, width=1000),
    )
    train, held_out = mails.scenarios("train"), mails.scenarios("test")
    with ArtClient(art_server.base_url, art_server.api_key) as client:
        rollout = make_rollout(model, mails)
        first = await trainer.fit(rollout, train, steps=1)
        before = client.checkpoints(policy)
        found = await trainer.tune(rollout, train, steps=2, eval_scenarios=held_out)
        own = default_learning_rate(client.status().parameters, LoraConfig(rank=2, alpha=4.0))
        rates = [one.learning_rate for one in found.probes]
        assert rates == pytest.approx([own / 3, own, own * 3])
        assert client.policy(policy).version == first.version
        assert client.checkpoints(policy) == before
        again = await trainer.tune(
            rollout, train, rates=rates[-1:], steps=2, eval_scenarios=held_out
        )
        assert again.probes == found.probes[-1:], "one seed, one probe"
        calls: list[Any] = []

        async def breaks(scenario: Any) -> Any:
            calls.append(scenario)
            if len(calls) > 8:
                raise ValueError("the tool is gone")
            return await rollout(scenario)

        with pytest.raises(RolloutFailed, match="the tool is gone"):
            await trainer.tune(breaks, train, rates=[1e-3], steps=2)
        assert len(calls) > 8, "the first step was trained"
        assert client.checkpoints(policy) == before
        assert client.policy(policy).version == first.version
    mails.close()
    assert found.held_out and found.runs == 3 * (2 * 2 * 4 + 4), "as many as were asked for"
    assert found.tokens["completion"] > 0 and found.seconds > 0
    assert all(one.mean is not None for one in found.probes) and found.why
    assert f"{policy}@{first.version} serves as before" in told.getvalue()
    (shown := Console(file=io.StringIO(), width=200)).print(tune_table(found))
    text = " ".join(shown.file.getvalue().split())  # type: ignore[attr-defined]
    assert f"{found.runs} runs, {found.tokens['completion']} tokens sampled" in text
    assert found.best is None or "take this one" in text or "the highest, not clear" in text


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"tune_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(ROLLOUT)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in SCENARIOS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return name


def test_the_command_prints_a_table_and_json(
    art_server: LiveServer,
    rollouts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    monkeypatch.setenv("ART_API_KEY", art_server.api_key or "EMPTY")
    policy = f"tuned-{uuid.uuid4().hex[:8]}"
    ask = ["tune", f"{rollouts}:rollout", "train.jsonl", "--policy", policy, "--steps", "2"]
    ask += ["--group-size", "2", "--groups-per-step", "2", "--rates", "1e-3,3e-3", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(ask)
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    told = json.loads(out)
    assert [one["learning_rate"] for one in told["probes"]] == [1e-3, 3e-3]
    assert told["runs"] == 16 and not told["held_out"]
    assert f"{policy}@0 serves as before" in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["nowhere:rollout", "train.jsonl"], "cannot be loaded"),
        (["{}:nothing", "train.jsonl"], "cannot be loaded"),
        (["{}", "train.jsonl"], "expected MODULE:NAME"),
        (["{}:rollout", "train.jsonl", "--rates", "1e-3;3e-3"], "expected numbers with commas"),
        (["{}:rollout", "train.jsonl", "--rates", "5"], "at most 0.1"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    more: list[str], words: str, rollouts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *(one.format(rollouts) for one in more), "--policy", "p"])
    assert ended.value.code == 1 and words in capsys.readouterr().err

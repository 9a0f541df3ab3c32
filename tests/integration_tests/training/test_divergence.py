"""`langchain-art fits diff`: the first thing that two fits with one seed do differently."""

import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from langchain_art import Run, TrainConfig, capture
from langchain_art.cli import main
from langchain_art.errors import ConfigError
from langchain_art.training.records import StepRecord
from tests.support.chat_models import model_of
from tests.support.fits import write_fit
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id
from tests.support.trainers import trainer_of

ASKED = ["Who?", "When?", "Where?"]


def fit(
    server: LiveServer,
    root: Path,
    name: str,
    *,
    hot: bool = False,
    bonus: float = 0.0,
    rate: float = 1e-2,
) -> str:
    """A fit of two steps in a folder below `root`, whose second step may differ; its policy."""
    policy, done = new_id(name), list[int]()
    model = model_of(server, policy, max_tokens=5)

    async def rollout(question: str) -> Run:
        async with capture(scenario=question) as run:
            first = await model.ainvoke(question, temperature=2.0 if hot and done else 1.0)
            second = await model.ainvoke(f"And {first.text}?", temperature=1.0)
            run.reward = len(first.text + second.text) / 50 + run.rng.random()
            run.reward += bonus if done and question == "When?" else 0.0
        return run

    config = TrainConfig(learning_rate=rate)
    sizes = {"group_size": 2, "groups_per_step": 3}
    trainer = trainer_of(server, root / name, policy, config=config, **sizes)

    def note(record: StepRecord) -> None:
        done.append(record.step)

    trainer.fit_sync(rollout, ASKED, steps=2, on_step=note)
    return policy


@pytest.fixture(scope="module")
def root(art_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fit that the others are compared with."""
    folder = tmp_path_factory.mktemp("fits")
    fit(art_server, folder, "base")
    return folder


def differ(server: LiveServer, root: Path, one: str, other: str) -> tuple[int, str]:
    asked = ["fits", "diff", one, other, "--root", str(root), "--base-url", server.base_url]
    done = CliRunner().invoke(main.app, asked)
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.exit_code, done.output.strip()


def test_equal_fits_are_equal_with_their_adapters(art_server: LiveServer, root: Path) -> None:
    policy = fit(art_server, root, "again")
    code, said = differ(art_server, root, "again", "base")
    adapter = art_server.data_dir / "adapters" / policy / "2" / "adapter_model.safetensors"
    digest = sha256(adapter.read_bytes()).hexdigest()
    tokens = re.search(r"equal: 24 calls, (\d+) tokens, ", said)
    assert code == 0 and said.endswith(f"adapters {policy}@2 sha256 {digest}")
    assert tokens is not None and 24 <= int(tokens[1]) <= 24 * 5


def test_another_temperature_shows_at_the_first_token_or_logprob(
    art_server: LiveServer, root: Path
) -> None:
    fit(art_server, root, "hot", hot=True)
    code, said = differ(art_server, root, "base", "hot")
    wanted = (
        r"step 2, scenario '(Who|When|Where)\?', member 0, node -, call 0, (token|logprob) \d: "
        r"\S+ and \S+; its temperature is 1.0 and 2.0 \(equal before: 12 calls, "
    )
    assert code == 1 and re.search(wanted, said), said


def test_another_reward_shows_though_all_tokens_are_equal(
    art_server: LiveServer, root: Path
) -> None:
    fit(art_server, root, "bonus", bonus=0.5)
    code, said = differ(art_server, root, "base", "bonus")
    found = re.search(r"step 2, scenario 'When\?', member 0, reward: (\S+) and (\S+) \(", said)
    assert code == 1 and found is not None, said
    assert float(found[2]) - float(found[1]) == pytest.approx(0.5)


def test_another_learning_rate_shows_in_the_first_steps_training_and_in_a_weight(
    art_server: LiveServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(art_server, root, "slow", rate=5e-3)
    code, said = differ(art_server, root, "base", "slow")
    assert "; config.learning_rate 0.01 -> 0.005\n" in said
    wanted = r"\nstep 1, base-\w+, learning_rate: 0.01 and 0.005 \(equal before: 12 calls, "
    assert code == 1 and re.search(wanted, said), said
    # With no metric before it: those of the machine alone are left out otherwise.
    monkeypatch.setattr("langchain_art.training.fits._OF_THE_MACHINE", ("",))
    code, said = differ(art_server, root, "base", "slow")
    found = re.search(r"step 1, base-\w+, weight \S+lora_\S+\[\d+\]: (\S+) and (\S+) \(", said)
    assert code == 1 and found is not None and float(found[1]) != float(found[2]), said


def test_a_fit_that_goes_on_differs_where_the_other_has_ended(
    art_server: LiveServer, root: Path
) -> None:
    shutil.copytree(root / "base", root / "short")
    lines = (root / "base" / "history.jsonl").read_text().splitlines(keepends=True)
    (root / "short" / "history.jsonl").write_text(lines[0])
    code, said = differ(art_server, root, "base", "short")
    assert code == 1 and "short has ended after step 1, the other has not (equal" in said


def test_fits_of_two_seeds_are_refused(art_server: LiveServer, root: Path) -> None:
    write_fit(root / "other", [0.1], seed=1)
    with pytest.raises(ConfigError, match="the seeds 0 and 1, expected one seed"):
        differ(art_server, root, "base", "other")

"""The learner on Unsloth, in an environment of its own and on a CPU, against the PEFT learner."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art.wire import KLPenalty, LoraConfig, PreferenceConfig, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.unsloth.learner import UnslothLearner
from langchain_art_server.config import Settings, UnslothSettings
from langchain_art_server.quantize_base import quantized
from tests.support.environments import unsloth_python
from tests.support.learner_cases import (
    FILES,
    LENIENT,
    LORA,
    branching_rows,
    contents,
    folder,
    fresh,
    make_rows,
    quiet,
)
from tests.support.preference_cases import OfCore, make_pairs, prefer
from tests.support.ranks import ignore
from tests.support.soak import count, in_soak, in_soak_alone
from tests.support.tiny_models import save_model

#: Largest difference of a weight after five steps: other releases of torch's callers, same numbers.
TOLERANCE = 1e-5
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def python() -> Path:
    return unsloth_python()


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        *map(in_soak_alone, ("llama", "gemma3")),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("unsloth") / request.param, request.param)


def learner_for(model: Path, python: Path, **settings: object) -> UnslothLearner:
    chosen = {"python": python, "threads": 1} | settings
    return UnslothLearner(
        Settings(model=str(model), device="cpu", learner=UnslothSettings.model_validate(chosen))
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learner(model: Path, python: Path) -> AsyncIterator[UnslothLearner]:
    """One child for each model. It lives in one event loop, as the tests that use it do."""
    made = learner_for(model, python)
    await made.start()
    yield made
    await made.close()


@pytest.mark.soak
@pytest.mark.asyncio(loop_scope="module")
async def test_its_adapter_is_the_peft_learners(
    learner: UnslothLearner, model: Path, tmp_path: Path
) -> None:
    core = LearnerCore(str(model))
    ours, theirs = fresh(core, tmp_path), folder(tmp_path, "theirs0")
    await learner.init_adapter(theirs, LORA)
    assert contents(theirs)[FILES[1]] == contents(ours)[FILES[1]]
    for step in range(1, count(2, 5) + 1):
        rows = branching_rows(10, seed=step, temperature=0.8)
        config = TrainConfig(
            learning_rate=1e-2,
            optimizer_steps=2,
            kl=KLPenalty(estimator="k3", coefficient=0.02),
            **LENIENT,
        )
        out = folder(tmp_path, f"ours{step}")
        expected = core.step(LearnerStep(ours, out, step, rows, config), quiet)
        ours, out = out, folder(tmp_path, f"theirs{step}")
        metrics = await learner.step(LearnerStep(theirs, out, step, rows, config), ignore)
        theirs = out
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
        assert metrics["forest"] == expected["forest"]
    got, wanted = load_file(theirs / FILES[1]), load_file(ours / FILES[1])
    first = load_file(tmp_path / "theirs0" / FILES[1])
    assert got.keys() == wanted.keys()
    assert max((wanted[name] - first[name]).abs().max().item() for name in got) > 0.01
    apart = max((got[name] - wanted[name]).abs().max().item() for name in got)
    assert apart <= TOLERANCE
    rows = make_rows(4)
    for adapter in (theirs, None):
        found = await learner.logprobs(adapter, rows)
        for own, plain in zip(found, core.logprobs(adapter, rows), strict=True):
            assert own == pytest.approx(plain.tolist(), abs=1e-4)
    assert learner.restarts == 0


@pytest.mark.soak
@pytest.mark.asyncio(loop_scope="module")
async def test_its_preference_steps_are_the_peft_learners(
    learner: UnslothLearner, model: Path, tmp_path: Path
) -> None:
    core = LearnerCore(str(model))
    ours = theirs = first = fresh(core, tmp_path)
    config = PreferenceConfig(learning_rate=1e-2, beta=0.3)
    for step in range(1, count(2, 3) + 1):
        pairs = make_pairs(4, seed=step, turns=2)
        out = folder(tmp_path, f"ours{step}")
        expected = await prefer(OfCore(core), ours, out, step, pairs, config)
        ours, out = out, folder(tmp_path, f"theirs{step}")
        metrics = await prefer(learner, theirs, out, step, pairs, config)
        theirs = out
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    got, wanted, start = (load_file(path / FILES[1]) for path in (theirs, ours, first))
    assert max((wanted[name] - start[name]).abs().max().item() for name in got) > 0.01
    assert max((got[name] - wanted[name]).abs().max().item() for name in got) <= TOLERANCE


@pytest.mark.asyncio(loop_scope="module")
async def test_shapes_change_and_what_is_wrong_is_refused(
    learner: UnslothLearner, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="q_proj"):
        await learner.init_adapter(folder(tmp_path, "no"), LoraConfig(targets=("nonsense",)))
    one, two, out = (folder(tmp_path, name) for name in ("one", "two", "out"))
    await learner.init_adapter(one, LORA)
    await learner.init_adapter(two, LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    config = TrainConfig(learning_rate=1e-2, **LENIENT)
    await learner.step(LearnerStep(one, out, 1, make_rows(4), config), ignore)
    assert load_file(out / FILES[1]).keys() == load_file(one / FILES[1]).keys()
    with pytest.raises(InvalidRequest):
        await learner.step(LearnerStep(one, out, 1, [], config), ignore)
    turns = await learner.logprobs(two, make_rows(2))
    assert len(turns) == 2


# A second start of Unsloth costs half a minute: in ``make test``, `test_unsloth_calls` has this
# refusal, and `test_learner_ranks` a start that is stopped by one.
@in_soak
async def test_what_cannot_be_loaded_stops_the_start(python: Path, tmp_path: Path) -> None:
    plain = save_model(tmp_path / "m", hidden_size=64, intermediate_size=128, head_dim=16)
    quantised = learner_for(quantized(str(plain), tmp_path, "cpu"), python)
    with pytest.raises(ConfigError, match="CUDA"):
        await quantised.start()
    await quantised.close()

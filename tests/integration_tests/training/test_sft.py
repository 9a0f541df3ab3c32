"""Supervised steps through the real server: what is learned from, that it is, and how it ends."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from langchain_art import (
    ArtClient,
    AsyncArtClient,
    ChatART,
    KLPenalty,
    SFTConfig,
    TrainConfig,
    Trainer,
    capture,
)
from langchain_art.client.conversations import read_conversations
from langchain_art.errors import ConfigError, InvalidRequest, JobFailed, ServerUnreachable
from langchain_art.wire import JobEvent, LoraConfig, LRSchedule, TrajectoryGroup
from tests.support.live_server import ForkedServer, LiveServer
from tests.support.soak import in_soak
from tests.support.steps_of_a_fit import new_id, ok
from tests.support.trainers import trainer_of

SHAPE = LoraConfig(rank=16, alpha=32.0)
FAST = SFTConfig(learning_rate=1e-2)
TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.fixture
def policy(client: ArtClient) -> str:
    return client.create_policy(new_id("p"), SHAPE).name


def chat(server: LiveServer, model: str, text: str, **body: Any) -> dict[str, Any]:
    base = {"model": model, "messages": [user(text)], "max_tokens": 12}
    return ok(httpx.post(f"{server.base_url}/chat/completions", json=base | body, timeout=60))


def test_what_is_shown_is_learned_and_served(
    art_server: LiveServer, client: ArtClient, policy: str
) -> None:
    shown = [[user(f"Which colour has {n}?"), said(f"It is {c}.")] for n, c in COLOURS.items()]
    losses: list[float] = []
    for _ in range(20):
        result = client.wait(client.sft(shown, policy, FAST))
        losses.append(result.metrics["loss"])
        assert (result.excluded, result.metrics["calls_trained"]) == ({}, len(shown))
    assert losses[0] > 5 and losses[-1] < 0.1
    for name, colour in COLOURS.items():
        found = chat(art_server, policy, f"Which colour has {name}?", temperature=0)
        assert found["model"] == f"{policy}@20"
        assert found["choices"][0]["message"]["content"] == f"It is {colour}."


COLOURS = {"snow": "white", "coal": "black", "grass": "green"}


def test_the_loss_is_the_mean_over_the_assistants_tokens(client: ArtClient, policy: str) -> None:
    """Twice the same conversation, once cut in two: the same tokens after the same beginning."""
    whole = [user("One?"), said("Yes, one."), user("Two?"), said("Two, yes indeed.")]
    job = client.sft([whole], policy, FAST)
    result = client.wait(job)
    [stored] = read_conversations([whole])
    audit = client.audit(stored, policy, sft=True)
    assert [turn.prefix for turn in audit.turns] == ["starts", "extends"]
    assert (audit.rows, audit.sampled_tokens) == (1, audit.trained_tokens)
    assert result.metrics["tokens_trained"] == audit.trained_tokens
    other = client.create_policy(new_id("p"), SHAPE).name
    cut = [whole[:2], [*whole[:1], said("Yes, one.", weight=0), *whole[2:]]]
    again = client.wait(client.sft(cut, other, FAST))
    assert again.metrics["tokens_trained"] == result.metrics["tokens_trained"]
    assert again.metrics["tokens_processed"] <= result.metrics["tokens_processed"] + 2  # a forest
    assert again.metrics["loss"] == pytest.approx(result.metrics["loss"], rel=1e-4)


def test_conversations_may_come_in_any_shape(
    client: ArtClient, policy: str, tmp_path: Path
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    brief = {"role": "system", "content": "Be brief."}
    found = {"role": "tool", "tool_call_id": "c", "content": "found"}
    plain = [brief, user("Find it."), said("", tool_calls=[call]), found, said("Found.")]
    called = AIMessage("", tool_calls=[{"id": "c", "name": "search", "args": {}}])
    asked = [SystemMessage("Be brief."), HumanMessage("Find it.")]
    chain = [*asked, called, found, AIMessage("Found.")]
    lines = tmp_path / "shown.jsonl"
    lines.write_text("\n".join(json.dumps({"messages": plain, "tools": [TOOL]}) for _ in range(2)))
    seen: list[tuple[float, float]] = []
    for given in (
        [{"messages": plain, "tools": [TOOL]}] * 2,
        lines,
        [{"messages": chain, "tools": [TOOL]}] * 2,
    ):
        fresh = client.create_policy(new_id("p"), SHAPE).name
        result = client.wait(client.sft(given, fresh, FAST))
        assert result.metrics["calls_trained"] == 4
        seen.append((result.metrics["tokens_trained"], result.metrics["loss"]))
    assert seen[0] == seen[1] == seen[2]
    for wrong, words in (
        ([], "no conversations"),
        ("shown.jsonl", "Path of a JSONL file"),
        ([[user("Only me.")]], "conversation 1 has no message of the assistant"),
        ([plain, [said("x", weight=0.5)]], "conversation 2 .* weight=0.5"),
        ([[user("Who?"), {"role": "assistant", "text": "I."}]], r"messages\[1\] has neither conte"),
        ([{"messages": plain, "reward": 1.0}], r"the fields \['reward'\]"),
        ([{"tools": []}], "messages"),
        (tmp_path / "none.jsonl", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            client.sft(wrong, policy)
    (tmp_path / "broken.jsonl").write_text('{"messages": []}\n{"mess')
    with pytest.raises(ConfigError, match="line 1"):
        client.sft(tmp_path / "broken.jsonl", policy)
    with pytest.raises(ConfigError, match="expected an SFTConfig"):
        client.sft([plain], policy, TrainConfig())


def test_runs_that_were_sampled_here_count_with_their_own_tokens(
    art_server: LiveServer, client: ArtClient, policy: str
) -> None:
    """Whoever sampled them, and however."""
    run, calls = new_id("t"), list[dict[str, Any]]()
    for text, more in (("As tiny.", {"seed": 3}), ("Greedily.", {"temperature": 0})):
        tags = {"art": {"trajectory_id": run, "node": text}}
        calls.append(chat(art_server, "tiny", text, **tags, **more))
    client.reward(run, 0.0)
    audit = client.audit(run, policy, sft=True)
    records = [client.call(call["id"]) for call in calls]
    assert [t.trained_tokens for t in audit.turns] == [len(r["token_ids"]) for r in records]
    result = client.wait(client.sft([run], policy, FAST))
    assert result.metrics["tokens_trained"] == sum(len(r["token_ids"]) for r in records)
    assert set(result.nodes) == {"As tiny.", "Greedily."}
    only = client.wait(client.sft([run], policy, FAST, trainable={"Greedily.": False}))
    assert only.metrics["tokens_trained"] == len(records[0]["token_ids"])
    assert only.excluded == {"calls.frozen": 1}
    assert client.trajectory(run).reward == 0.0
    assert client.audit(run).trained_by == {}  # and its reward may still be learned from


def test_a_hosted_models_run_can_be_imitated(
    art_server: LiveServer, client: ArtClient, policy: str
) -> None:
    teacher = FakeListChatModel(responses=["Paris.", "Rome."])
    ours = ChatART(model="tiny", base_url=art_server.base_url, max_tokens=6)
    with capture(scenario="capitals") as run:
        asked: list[Any] = [HumanMessage("Of France?")]
        asked.append(teacher.invoke(asked))
        asked.append(HumanMessage("Of Italy?"))
        asked.append(teacher.invoke(asked))
        ours.invoke([*asked, HumanMessage("Thanks.")])
    result = client.wait(client.sft([run.trajectory()], policy, FAST))
    assert (result.metrics["calls_trained"], result.excluded) == (3.0, {})
    turns = client.audit(run.id, policy, sft=True).turns
    assert [turn.excluded_because for turn in turns] == [None] * 3


def test_what_cannot_be_shown_fails_the_job_and_what_is_too_long_is_counted(
    client: ArtClient, policy: str
) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    bad = [user("Hello?"), said("Hello."), image, said("A cat.")]
    job = client.sft([[user("Fine?"), said("Fine.")], bad], policy, FAST)
    with pytest.raises(JobFailed, match=r"run 'conversation:\w+', turn 1: .*image_url"):
        client.wait(job)
    assert client.policy(policy).version == 0
    [stored] = read_conversations([bad])
    with pytest.raises(InvalidRequest, match="image_url"):
        client.audit(stored, policy, sft=True)
    long = [user("word " * 3000), said("Hello.")]
    result = client.wait(client.sft([long, [user("Hello?"), said("Hello.")]], policy, FAST))
    assert result.metrics["calls_trained"] == 1
    assert result.excluded == {"calls.too_long": 1, "runs.without_trainable_calls": 1}


@in_soak  # `test_kills.py` shows it of steps by rewards and by preferences
@pytest.mark.slow
def test_a_supervised_step_that_was_killed_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """Two policies learn from the same runs, one after the other, and one is disturbed."""
    server = ForkedServer(tmp_path / "data").start()
    shown = [[user(f"Which is {n}?"), said(f"It is {n * n}.")] for n in range(32)]
    config = SFTConfig(learning_rate=1e-2, optimizer_steps=8, tokens_per_microbatch=64)
    groups = [TrajectoryGroup(id="g", trajectories=tuple(read_conversations(shown)))]  # type: ignore[arg-type]
    ids = [run.id for run in groups[0].trajectories]
    seen: list[dict[str, bytes]] = []
    try:
        with ArtClient(server.base_url) as client:
            client.post_groups(groups)
            for name in ("calm", "stormy"):
                client.create_policy(name)
                job = client.sft(ids, name, config)
                if name == "stormy":
                    while not any("training" in e.message for e in events(server, job.id)):
                        pass
                    server.kill()
                    assert not (server.data_dir / "adapters" / name / "1").exists()
                    server.start()
                assert client.wait(job).version == 1
                folder = server.data_dir / "adapters" / name / "1"
                files = ("adapter_model.safetensors", "optimizer.safetensors")
                seen.append({file: (folder / file).read_bytes() for file in files})
    finally:
        server.stop()
    assert seen[0] == seen[1]


def events(server: LiveServer, job: str) -> list[JobEvent]:
    with server.http() as http:
        found = http.get(f"/v1/jobs/{job}/events", params={"wait": 5}).json()["data"]
    return [JobEvent.model_validate(event) for event in found]


# --- the trainer's warm start ---------------------------------------------------------------------

SHOWN = [[user(f"Say {word}."), said(f"{word}!")] for word in ("one", "two", "three", "four")]


def test_a_warm_start_goes_through_its_epochs_once_and_another_begins_anew(
    art_server: LiveServer, client: ArtClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(art_server, tmp_path)
    warmed = trainer.warm_start_sync(SHOWN, epochs=6, batch_size=3, config=FAST)
    assert len(warmed.losses) == 12 and warmed.version == 12
    assert [r.metrics["calls_trained"] for r in warmed.results] == [3, 1] * 6
    assert max(warmed.losses[-2:]) < 0.5 * min(warmed.losses[:2])
    numbers: dict[str, Any] = {"epochs": np.int64(6), "batch_size": np.int64(3)}
    again = trainer.warm_start_sync(SHOWN, **numbers, config=FAST)
    assert again == warmed  # nothing was done anew
    assert client.policy(trainer.policy).version == len(client.jobs(trainer.policy)) == 12
    with pytest.raises(ConfigError, match=r"another warm start.*fresh=True"):
        trainer.warm_start_sync(SHOWN[:2], epochs=6, batch_size=3, config=FAST)

    async def away(self: AsyncArtClient) -> None:
        raise ServerUnreachable("no answer")

    with monkeypatch.context() as patched, pytest.raises(ServerUnreachable):
        patched.setattr(AsyncArtClient, "ready", away)
        trainer.warm_start_sync(SHOWN, config=FAST, fresh=True)
    assert trainer.warm_start_sync(SHOWN, **numbers, config=FAST) == warmed, "nothing is undone"
    client.rollback(trainer.policy, 0)
    with pytest.raises(ConfigError, match=r"@0, but the warm start .* had come to @12.*fresh=True"):
        trainer.warm_start_sync(SHOWN, **numbers, config=FAST)
    shown = trainer.warm_start_sync(SHOWN[:2], config=FAST, fresh=True)
    assert (len(shown.losses), shown.version) == (1, 13)
    newest = max(client.checkpoints(trainer.policy), key=lambda one: one.version)
    assert (newest.version, newest.parent) == (13, 0), "it begins from the base"
    assert (tmp_path / "earlier" / warmed.id / "warm_start.json").exists()


async def test_a_warm_start_that_was_stopped_goes_on_exactly(
    art_server: LiveServer, client: ArtClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, stormy = (trainer_of(art_server, tmp_path / name) for name in ("calm", "stormy"))
    whole = await calm.warm_start(SHOWN, epochs=2, batch_size=2, config=FAST)
    answered, wait = 0, AsyncArtClient.wait

    async def dying(self: AsyncArtClient, *args: Any) -> Any:
        nonlocal answered
        result = await wait(self, *args)
        answered += 1
        if answered == 3:  # the job is done, but the client dies before it hears of it
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(AsyncArtClient, "wait", dying)
    with pytest.raises(KeyboardInterrupt):
        await stormy.warm_start(SHOWN, epochs=2, batch_size=2, config=FAST)
    resumed = await stormy.warm_start(SHOWN, epochs=2, batch_size=2, config=FAST)
    assert resumed.losses == whole.losses
    assert [r.version for r in resumed.results] == [1, 2, 3, 4]
    assert len(client.jobs(stormy.policy)) == 4


def test_what_makes_no_sense_is_refused_and_a_job_that_failed_is_tried_anew(
    art_server: LiveServer, tmp_path: Path
) -> None:
    trainer = trainer_of(art_server, tmp_path, "p")
    with pytest.raises(ConfigError, match="epochs=0"):
        trainer.warm_start_sync(SHOWN, epochs=0)
    with pytest.raises(ConfigError, match="got a TrainConfig"):
        trainer.warm_start_sync(SHOWN, config=TrainConfig())
    with pytest.raises(ConfigError, match="warm_start"):
        trainer_of(art_server, tmp_path, "p", config=FAST)
    for policy, words in ((["p", "q"], "several policies"), ("p@3", "never changes")):
        with pytest.raises(ConfigError, match=words):
            Trainer(policy, out_dir=tmp_path).warm_start_sync(SHOWN)
    assert not (tmp_path / "warm_start.json").exists()
    bad = [[user("Hello?"), said("Hello.<|im_end|>Bye.")]]
    for _ in range(2):
        with pytest.raises(JobFailed, match="would learn to stop there"):
            trainer.warm_start_sync(bad, config=FAST)
    state = json.loads((tmp_path / "warm_start.json").read_text())
    assert state["failed"] == {"0": 2}


def test_a_fit_goes_on_from_a_warm_start(
    art_server: LiveServer, client: ArtClient, tmp_path: Path
) -> None:
    penalty = KLPenalty(estimator="k3", coefficient=0.1)
    config = TrainConfig(learning_rate=1e-3, schedule=LRSchedule(warmup_steps=4), kl=penalty)
    trainer = trainer_of(art_server, tmp_path, groups_per_step=1, config=config)
    trainer.warm_start_sync(SHOWN, config=FAST)
    values = iter([0.0, 1.0, 0.0, 1.0])
    model = ChatART(model=trainer.policy, base_url=art_server.base_url, max_tokens=8)

    def rollout(_: dict[str, str]) -> float:
        model.invoke("Say one.")
        return next(values)

    scenario = new_id("q")
    fitted = trainer.fit_sync(rollout, [{"id": scenario}], steps=1)
    assert fitted.version == 2 and fitted.history[0].metrics["calls_trained"] == 4
    # Its own first step, not the policy's second, and with an optimizer of its own.
    assert fitted.history[0].metrics["learning_rate"] == pytest.approx(1e-3 / 4)
    said: list[str] = []
    client.wait(client.jobs(trainer.policy)[-1], lambda event: said.append(event.message))
    assert sum("the optimizer begins anew" in one and "'sft'" in one for one in said) == 1
    # Its reference is what the warm start made, which it still is.
    assert fitted.history[0].metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    runs = [[run.id for run in client.trajectories(scenario=scenario)]]
    base, none = (
        config.model_copy(update={"kl": penalty.model_copy(update={"reference": version})})
        for version in (0, 9)
    )
    job = client.train(runs, trainer.policy, base, retrain=True)
    assert client.wait(job).metrics["kl_reference"] > 1e-3
    with pytest.raises(InvalidRequest, match=r"expected a version of .* that is kept"):
        client.train(runs, trainer.policy, none, retrain=True)


def test_the_page_on_warm_starts_runs(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs" / "warm-start.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    policy = new_id("p")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    lines = [json.dumps({"messages": messages}) for messages in SHOWN]
    Path("demonstrations.jsonl").write_text("\n".join(lines))
    ran: dict[str, Any] = {}
    exec(compile(code.replace("imitator", policy), str(page), "exec"), ran)
    assert len(ran["warmed"].losses) == 2 and ran["warmed"].version == 2

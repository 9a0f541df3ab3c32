"""One call ends no batch: what cannot be computed of it is its own error, and the others go on."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_art.errors import ArtError, InvalidRequest, PromptTooLong
from langchain_art_server.backends.base import ChatRequest
from langchain_art_server.backends.chat.chat_template import ChatTemplate, Prompt
from langchain_art_server.backends.chat.output_processor import OutputProcessor
from langchain_art_server.backends.embedded.model_runner import SlotRunner
from langchain_art_server.backends.ipc.channel import EngineCall
from tests.support.soak import count, in_soak_alone
from tests.support.tiny_models import (
    SMALL,
    LocalSampler,
    ask,
    save_adapter,
    save_model,
    tokenizer,
)

#: The calls of seed 2 take longer than those of the three beside it.
SEEDS = [in_soak_alone(one) if one == 2 else one for one in range(count(4, 400))]


def good(seed: int) -> ChatRequest:
    return ask("and the mail of Ann", seed=seed, max_tokens=24, stream=bool(seed % 2))


def beside(sampler: LocalSampler, *bad: ChatRequest) -> list[BaseException | None]:
    """The errors of bad calls among good ones, which get the replies that they get alone."""
    alone = [sampler.chat(good(seed))[0].token_ids for seed in range(4)]
    assert all(len(ids) > 1 for ids in alone)
    calls = [sampler.send(good(0)), sampler.send(good(1))]
    sampler.turn()
    wrong = [sampler.send(one) for one in bad]
    calls += [sampler.send(good(2)), sampler.send(good(3))]
    sampler.run()
    assert [sampler.reply(call).token_ids for call in calls] == alone
    return [sampler.errors.get(call.id) for call in wrong]


def test_a_token_beyond_the_embedding_is_refused(sampler: LocalSampler) -> None:
    """The start refuses such a tokenizer; one whose file lies has them all the same."""
    known = sampler.host._template.tokenizer
    known.add_tokens([f"<more{at}>" for at in range(40)])
    assert known.convert_tokens_to_ids("<more39>") >= SMALL["vocab_size"]
    bad = [
        ask("say <more39> to Ann"),
        ask(messages=[{"role": "system", "content": "<more39>"}, {"role": "user", "content": "x"}]),
        ask("<more39>", stream=True, response_format={"type": "json_object"}),
    ]
    for error in beside(sampler, *bad):
        assert isinstance(error, InvalidRequest) and error.param == "messages"
        assert "'<more39>'" in str(error) and "expected one below 344" in str(error)


def test_a_prompt_without_a_token_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(bare)
    (error,) = beside(LocalSampler(folder), ask(""))
    assert isinstance(error, InvalidRequest) and "no token" in str(error)


@pytest.mark.parametrize(("stop", "stream"), [((), True), (("never said",), False)])
def test_a_reply_that_cannot_be_read_fails_alone(
    sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], stream: bool
) -> None:
    update: Callable[..., Any] = OutputProcessor.update

    def broken(self: OutputProcessor, ids: list[int], *, last: bool = False) -> Any:
        if bad and bad[0] is self and len(ids) > 3:
            raise KeyError("a fault of the parser")
        return update(self, ids, last=last)

    bad: list[OutputProcessor] = []
    begin = OutputProcessor.__init__

    def made(self: OutputProcessor, request: ChatRequest, *rest: Any) -> None:
        begin(self, request, *rest)
        if request.id == wrong.id:
            bad.append(self)

    monkeypatch.setattr(OutputProcessor, "update", broken)
    monkeypatch.setattr(OutputProcessor, "__init__", made)
    wrong = ask(stop=stop, stream=stream, seed=9, max_tokens=40)
    (error,) = beside(sampler, wrong)
    assert isinstance(error, KeyError)
    assert sampler.host.scheduler.counts == (0, 0)


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_pass_that_fails_for_one_row_ends_that_row(
    sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As a model's own code may, at a length or token that its config does not tell of."""
    mark = tokenizer().encode("<tool_call>", add_special_tokens=False)[0]
    compute: Callable[..., Any] = getattr(SlotRunner, where)

    def failing(self: SlotRunner, *got: Any) -> torch.Tensor:
        rows = sampler.host.scheduler._rows
        if where == "prefill":
            first, number = got[0], len(got[1])
        else:
            first, number = (got[3] if len(got) > 3 else 0), len(got[0])
        if any(mark in row.prompt for row in rows[first : first + number]):
            raise IndexError("index out of range in self")
        return compute(self, *got)

    monkeypatch.setattr(SlotRunner, where, failing)
    bad = [ask(f"say <tool_call> {n}", seed=n, stream=bool(n % 2)) for n in range(3)]
    for error in beside(sampler, *bad):
        assert isinstance(error, ArtError) and "index out of range in self" in str(error)
    assert sampler.host.scheduler.counts == (0, 0)


def test_a_pass_that_fails_for_no_row_alone_ends_the_engine(
    sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no call's fault; the engine is started again."""
    compute: Callable[..., Any] = SlotRunner.prefill

    def failing(self: SlotRunner, first: int, *got: Any) -> torch.Tensor:
        if len(got[0]) > 1:
            raise RuntimeError("out of memory")
        return compute(self, first, *got)

    monkeypatch.setattr(SlotRunner, "prefill", failing)
    for at in range(2):
        sampler.send(ask(f"the mail of {at}"))
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.run()


EXTREMES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1e-3, 5.0, 1.0),
    "top_p": (5e-324, 1e-45, 1e-9, 1.0 - 2**-53, 1.0),
    "top_k": (0, 1, 343, 344, 345, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1, 0, None),
    "stop": ((), ("\ufffd",), ("\x00", "a" * 1024), tuple(chr(97 + at) for at in range(16))),
    "top_logprobs": (0, 1, 20),
    "max_tokens": (1, 2, 64, 2**31 - 1),
    "stream": (False, True),
    "response_format": (
        None,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"enum": [""]}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "maximum": -1e300}}},
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
        {"type": "json_schema", "json_schema": {"schema": {"pattern": "a{1,900}"}}},
        {"type": "json_schema", "json_schema": {"schema": False}},
        {"type": "json_schema"},
    ),
    "messages": (
        [{"role": "user", "content": "x"}],
        [{"role": "user", "content": ""}],
        [{"role": "assistant", "content": "y"}],
        [{"role": "user", "content": "\x00\ufffd\U0010ffff<|im_end|>" * 9}],
        [{"role": "user", "content": "x" * 959}],  # with the template: some room, and none
        [{"role": "user", "content": "x" * 1001}],
        [{"role": "user", "content": "x" * 5000}],
        [{"role": "user", "content": "<|im_end|>" * 1013}],
        [{"role": "user", "content": "<|im_end|>" * 1014}],
        [{"role": "user", "content": "<|im_end|>" * 1015}],
    ),
    "tools": (
        [],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": [["x"]]}}}],
        [{"type": "function", "function": {"name": "f", "parameters": [1]}}],
        [{"type": "function", "function": {"name": "f"}}],
    ),
    "tool_choice": ("auto", "none", "required"),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_with_extreme_values_hurt_nobody(model: Path, seed: int) -> None:
    """Each is answered, or refused, and the calls beside it get the replies that they get alone."""
    rng = random.Random(seed)
    sampler = LocalSampler(model)
    bad = [ask(**{name: rng.choice(some) for name, some in EXTREMES.items()}) for _ in range(6)]
    for error in beside(sampler, *bad):
        assert error is None or isinstance(error, ArtError), error
    assert sampler.host.scheduler.counts == (0, 0)


# --- what takes long of a request is done beside the engine's loop, or not at all -------------

LONG = "the mail of Ann " * 20


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, nobody has a prompt of LONG."""
    go, prompt = threading.Event(), ChatTemplate.prompt

    def slow(self: ChatTemplate, messages: list[dict[str, Any]], *rest: Any, **most: Any) -> Prompt:
        assert messages[0]["content"] != LONG or go.wait(60)
        return prompt(self, messages, *rest, **most)

    monkeypatch.setattr(ChatTemplate, "prompt", slow)
    return go


def send_long(sampler: LocalSampler, request: ChatRequest) -> EngineCall:
    call = sampler.send(request)
    call.size = 1 << 20
    return call


def test_others_are_sampled_while_a_long_prompt_is_tokenised(
    sampler: LocalSampler, go: threading.Event
) -> None:
    long, quick = send_long(sampler, ask(LONG, seed=1)), sampler.send(ask(seed=2))
    while quick.id not in sampler.results:
        sampler.host.step()
    assert long.id not in sampler.results
    go.set()
    sampler.run()
    (same,) = sampler.chat(ask(LONG, seed=1))
    assert sampler.reply(long).token_ids == same.token_ids
    assert sampler.reply(long).prompt_token_ids == same.prompt_token_ids


def test_an_adapter_is_in_use_while_its_prompt_is_tokenised(
    sampler: LocalSampler, go: threading.Event, model: Path, tmp_path: Path
) -> None:
    sampler.load("a@1", save_adapter(tmp_path / "a", model, 1))
    adapter = sampler.host._adapters["a@1"]
    answered = send_long(sampler, ask(LONG, adapter="a@1", seed=1))
    cancelled = send_long(sampler, ask(LONG, adapter="a@1", seed=2))
    sampler.unload("a@1")  # after both calls, as they came
    assert adapter.users == 2
    cancelled.cancelled = True
    go.set()
    sampler.run()
    while adapter.users:
        sampler.host.step()
    assert sampler.reply(answered).token_ids
    assert cancelled.id not in sampler.results


def test_what_cannot_fit_is_not_tokenised(
    sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = sampler.host.info.max_prompt_chars
    assert most == 1024 * len("<|endoftext|>")
    with pytest.raises(PromptTooLong, match=r"too long: got .* tokens"):
        sampler.chat(ask("x" * (most - 100)))
    monkeypatch.setattr(ChatTemplate, "_encode", lambda *_: pytest.fail("it was tokenised"))
    with pytest.raises(PromptTooLong, match=f"expected at most {most}: more cannot fit"):
        sampler.chat(ask("x" * most))

"""``python -m tests.support.faulty_server MODEL``: the server with engines that can fail."""

import asyncio
import errno
import os
import re
import shutil
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from langchain_art.errors import ConfigError
from langchain_art_server import __main__ as door
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest, LearnerStep
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service


def fault() -> str:
    return Path(os.environ["FAULT_FILE"]).read_text()


class FaultySampler(TransformersSampler):
    """Draws from the wrong distribution, or says the wrong thing about it."""

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        now, sampling = fault(), request.sampling
        if now == "base model":
            request = replace(request, adapter=None)
        elif now == "temperature ignored":
            request = replace(request, sampling=replace(sampling, temperature=1.0))
        elif now == "base drifts" and request.adapter is None:
            request = replace(request, adapter=list(self._adapters)[-1])
        elif now == "hot":
            request = replace(request, sampling=replace(sampling, temperature=1.3))
        elif now == "truncated":
            request = replace(request, sampling=replace(sampling, top_k=2))
        others: list[ChatReply] = []
        for number in range(3 if now == "likeliest of four" else 0):
            seed = None if sampling.seed is None else sampling.seed + 1000 * (number + 1)
            again = replace(request, sampling=replace(sampling, seed=seed))
            others += [one async for one in super().chat(again) if isinstance(one, ChatReply)]
        async for reply in super().chat(request):
            if others and isinstance(reply, ChatReply):
                drawn = [*others, reply]
                reply = max(drawn, key=lambda one: sum(one.logprobs) / len(one.logprobs))
            yield _spoilt(reply, now) if isinstance(reply, ChatReply) else reply

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None:
        published = re.fullmatch(r"[1-9]\d*", path.name) is not None
        if fault() == "published version refused" and published:
            raise ConfigError(f"{name} is not to be loaded")
        if fault() == "stale adapter":
            policy = name.partition("@")[0]
            known = [p for n, (p, _) in self._adapters.items() if n.partition("@")[0] == policy]
            path = [path, *known][-1]
        await super().load_adapter(name, path, probe=probe)


def _spoilt(reply: ChatReply, now: str) -> ChatReply:
    logprobs = list(reply.logprobs)
    if now == "shifted":
        return replace(reply, logprobs=[*logprobs[1:], logprobs[0]])
    if now == "nan logprob":
        return replace(reply, logprobs=[float("nan"), *logprobs[1:]])
    if wrong := re.fullmatch(r"reply has (logprob|token) (.+)", now):
        name = "logprobs" if wrong[1] == "logprob" else "token_ids"
        number = float(wrong[2]) if wrong[1] == "logprob" else int(wrong[2])
        return replace(reply, **{name: [*getattr(reply, name)[:-1], number]})
    if now == "reply has a logprob too few":
        return replace(reply, logprobs=logprobs[:-1])
    if now == "truncated":  # as vLLM does with a model's generation_config
        return replace(reply, excluded_because=None, drawn_from=b"")
    return reply


class FaultyLearner(PeftLearner):
    """Learns, and saves something else."""

    async def step(self, request: LearnerStep, on_progress: Any) -> dict[str, float]:
        if fault() == "learner unlearns":
            rows = [replace(row, advantages=[-a for a in row.advantages]) for row in request.rows]
            request = replace(request, rows=rows)
        if fault() == "no space":
            raise OSError(errno.ENOSPC, "No space left on device")
        while fault() == "learner waits":
            await asyncio.sleep(0.05)
        metrics = await super().step(request, on_progress)
        if fault() in ("learner saves its parent", "nothing kept"):
            shutil.copyfile(request.parent / WEIGHTS_FILE, request.out / WEIGHTS_FILE)
        if fault() == "nothing kept":
            metrics |= {"step_kl": 0.0, "step_kept": 0.0}
        if now := re.fullmatch(r"learner saves weights (.+)", fault()):
            _spoil(request.out / WEIGHTS_FILE, now[1])
        return metrics


def _spoil(file: Path, how: str) -> None:
    """All weights times a factor, or one of them as a number that is none."""
    tensors = load_file(file)
    name = sorted(tensors)[0]
    if how.startswith("times "):
        tensors = {key: value * float(how[6:]) for key, value in tensors.items()}
    else:
        tensors[name].view(-1)[0] = float(how)
    save_file(tensors, file, metadata={"format": "pt"})


def shift_clock() -> None:
    """The fault "clock -20": the wall clock is 20 s behind."""
    right = time.time

    def shifted() -> float:
        kind, _, seconds = fault().partition(" ")
        return right() + (float(seconds) if kind == "clock" else 0.0)

    time.time = shifted


def build(settings: Settings) -> Service:
    return Service(settings, FaultySampler(settings), FaultyLearner(settings))


if __name__ == "__main__":
    shift_clock()
    door.build = build
    door.cli()

"""vLLM's HTTP API over a unix socket: token ids in, token ids out.

Prompts go as token ids to ``/v1/completions`` and replies come back as token ids; `chat` renders
and parses them. ``/v1/chat/completions`` would tokenise sampled text again in the next prompt, and
its tool parsers rewrite arguments, so histories would not hold what was sampled. A prompt with
images goes to ``/inference/v1/generate``, which takes token ids and images.

Formats: vLLM's documentation, "OpenAI-Compatible Server" and "LoRA Adapters".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art_server.backends.base import Sampling

log = logging.getLogger(__name__)
#: The base model's name in vLLM. Names of adapters have a slash, so they differ.
BASE = "base"
WAKE_PAUSE = 1.0  # seconds between two attempts to wake vLLM
_PREFIX = "token_id:"
#: Fields of a completion's body that the route for images has apart.
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed"),
    *("stop", "stop_token_ids", "structured_outputs"),
)
_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


class VllmError(Exception):
    """vLLM did not answer, or answered with an error of its own: it may be about to end."""


@dataclass
class Completion:
    """A completion, or the tokens of one that were sampled since its last piece."""

    token_ids: list[int]
    logprobs: list[float]  # under the distribution that was sampled
    prompt_ids: list[int] | None = None  # the prompt as vLLM got it; with the first piece only
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """Most probable ``(token id, logprob)`` per token, best first, if asked for."""
    finish: str | None = None  # ``stop`` or ``length`` with the last piece


def completion_body(
    model: str,
    prompt_ids: list[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    eos: list[int],
    grammar: str | None = None,
    stream: bool = False,
    tenant: str = "",
) -> dict[str, Any]:
    """The body of a completion, with every option that changes the distribution.

    `grammar` is in llguidance's dialect of Lark.
    """
    salt = model.partition("@")[0]
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_ids,
        "add_special_tokens": False,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop),
        "stop_token_ids": eos,
        "logprobs": sampling.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        # Per policy and tenant, or the time of an answer would tell what was asked of others.
        "cache_salt": f"{tenant}/{salt}" if tenant else salt,
        "stream": stream,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed & (2**63 - 1)
    if grammar is not None:
        body["structured_outputs"] = {"grammar": grammar}
    return body


def with_images(body: dict[str, Any], images: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A completion's body for the route that takes images: the name and the data URL of each."""
    sampling = {name: one for name, one in body.items() if name in _SAMPLING}
    # Its list of the most probable ones begins with the sampled one.
    sampling["logprobs"] = body["logprobs"] and body["logprobs"] + 1
    return {
        **{name: body[name] for name in ("model", "cache_salt", "stream")},
        "token_ids": body["prompt"],
        "content_parts": [{"type": "image_url", "url": url, "uuid": name} for name, url in images],
        "sampling_params": sampling,
        "return_token_ids": True,
    }


class VllmClient:
    """HTTP over vLLM's unix socket."""

    def __init__(self, socket: Path) -> None:
        self._http = httpx.AsyncClient(
            base_url="http://vllm",
            transport=httpx.AsyncHTTPTransport(
                uds=str(socket), limits=httpx.Limits(max_connections=None, keepalive_expiry=30)
            ),
            timeout=httpx.Timeout(None, connect=30),  # a long reply takes long
        )

    async def healthy(self, seconds: float) -> bool:
        """True if its health check passes within `seconds`."""
        try:
            answer = await self._http.get("/health", timeout=seconds)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    async def tokens(self, seconds: float) -> float:
        """Tokens that it has read and sampled since its start; -1 if it does not answer."""
        try:
            answer = await self._http.get("/metrics", timeout=seconds)
        except httpx.TransportError:
            return -1.0
        lines = [line for line in answer.text.splitlines() if line.startswith(_COUNTERS)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def context(self) -> int:
        """Tokens of its longest call. Raises VllmError."""
        answer = await self._ask("GET", "/v1/models")
        if answer.status_code != 200:
            raise VllmError(f"/v1/models: {_message(answer.content)}")
        return next(
            m["max_model_len"] for m in from_json(answer.content)["data"] if m["id"] == BASE
        )

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter. Raises ConfigError if vLLM refuses it, and VllmError."""
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = await self._ask("POST", "/v1/load_lora_adapter", body)
        if answer.status_code != 200:
            raise ConfigError(f"vLLM refused the adapter: {_message(answer.content)}")

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises VllmError."""
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def change(self, path: str) -> None:
        """Make it sleep or wake. Raises VllmError."""
        answer = await self._ask("POST", path, {})
        if answer.status_code != 200:
            raise VllmError(f"{path}: {_message(answer.content)}")

    async def wake(self, seconds: float) -> None:
        """Wake it: tried for so long, since the learner's memory may come back late.

        vLLM keeps what it has taken back and takes the rest the next time. Raises VllmError.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return await self.change("/wake_up")
            except VllmError as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("vLLM cannot wake yet: %s", error)
            await asyncio.sleep(WAKE_PAUSE)

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[Completion, None]:
        """Sample a completion: one piece, or one for every few tokens if the body says ``stream``.

        Closing the generator aborts the sampling. Raises InvalidRequest if vLLM refuses the body,
        and VllmError.
        """
        route = "/inference/v1/generate" if "content_parts" in body else "/v1/completions"
        if not body["stream"]:
            answer = await self._ask("POST", route, body)
            if answer.status_code != 200:
                raise _refusal(answer.status_code, answer.content)
            whole = from_json(answer.content)
            yield _completion(whole | whole["choices"][0])
            return
        try:
            async with self._http.stream("POST", route, json=body) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, await answer.aread())
                async for chunk in events(answer.aiter_bytes()):
                    if "error" in chunk:
                        raise VllmError(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        yield _completion(chunk | choice)
        except httpx.TransportError as error:
            raise VllmError(repr(error)) from error

    async def _ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise VllmError(repr(error)) from error


async def events(stream: AsyncIterable[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of server-sent events, as they come.

    Only a line feed ends a line: a model may sample U+2028 and the like, at which `str.splitlines`
    (and httpx's `aiter_lines`) would split an event.
    """
    rest = b""
    async for piece in stream:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield from_json(line[len(b"data: ") :])


def _refusal(status: int, content: bytes) -> Exception:
    message = _message(content)
    return InvalidRequest(message) if 400 <= status < 500 else VllmError(message)


def _message(content: bytes) -> str:
    try:
        return str(from_json(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:500]


def _completion(choice: dict[str, Any]) -> Completion:
    """Completion of a choice, with what the route says beside it."""
    finish = choice.get("finish_reason")
    if finish not in (None, "stop", "length"):
        raise VllmError(f"the completion ended with {finish!r}")
    ids: list[int] = choice["token_ids"]
    logprobs: dict[str, Any] = choice.get("logprobs") or {}
    if (content := logprobs.get("content")) is not None:  # of the route for images
        values = [one["logprob"] for one in content]
        top = [
            [(_token(other), other["logprob"]) for other in one["top_logprobs"]] for one in content
        ]
    else:
        values = logprobs.get("token_logprobs", [])
        found: list[dict[str, float] | None] = logprobs.get("top_logprobs") or []
        top = [
            [(_token({"token": key}), value) for key, value in (one or {}).items()] for one in found
        ]
    if len(values) != len(ids):
        raise VllmError(f"got {len(values)} logprobs for {len(ids)} tokens")
    return Completion(
        token_ids=ids,
        logprobs=values,
        prompt_ids=choice.get("prompt_token_ids"),
        top=[sorted(pairs, key=lambda pair: -pair[1]) for pairs in top],
        finish=finish,
    )


def _token(said: dict[str, Any]) -> int:
    """The id of a token, which vLLM says as a number or, as 0.31 does by each route, in words."""
    return said["token_id"] if "token_id" in said else int(said["token"].removeprefix(_PREFIX))

"""What we say to vLLM, and how its answers are read. Over a unix socket, tokens in and tokens out.

Prompts go in as token ids to ``/v1/completions`` and replies come back as token ids: chat templates
and tool calls are ours (`chat_format`, `chat_turn`). Over ``/v1/chat/completions`` vLLM would
render and tokenise by itself, and text that was sampled would be tokenised again in the next
prompt; its tool parsers write arguments anew, so that histories no longer hold what was said.

Formats: vLLM's documentation, "OpenAI-Compatible Server" and "LoRA Adapters".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art_server.backends.base import Sampling

#: The base model's name inside of vLLM. Adapters have a slash in theirs, so it can be none of them.
BASE = "base"
_PREFIX = "token_id:"
_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


class VllmFailed(Exception):
    """vLLM did not answer, or with an error of its own: it may be about to die."""


@dataclass(frozen=True)
class Drawn:
    """Tokens that were sampled since the last piece.

    Attributes:
        prompt_ids: what the model was shown; with the first piece only.
        token_ids: the tokens.
        logprobs: theirs, under the distribution that was sampled.
        top: per token the most probable ``(token id, logprob)``, best first, if asked for.
        finish: ``stop`` or ``length`` with the last piece.
    """

    token_ids: list[int]
    logprobs: list[float]
    prompt_ids: list[int] | None = None
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish: str | None = None


def completion_body(
    model: str,
    prompt_ids: list[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    eos: list[int],
    grammar: str | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    """The body of a completion. All that changes a distribution is said, none of it left open.

    `grammar` is in llguidance's dialect of Lark.
    """
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
        # Nobody may tell from the time of an answer what others have asked another policy.
        "cache_salt": model.partition("@")[0],
        "stream": stream,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed & (2**63 - 1)
    if grammar is not None:
        body["structured_outputs"] = {"grammar": grammar}
    return body


class VllmClient:
    """HTTP over vLLM's unix socket.

    Args:
        socket: its path.
    """

    def __init__(self, socket: Path) -> None:
        self._http = httpx.AsyncClient(
            base_url="http://vllm",
            transport=httpx.AsyncHTTPTransport(
                uds=str(socket),
                limits=httpx.Limits(max_connections=None, keepalive_expiry=30),
            ),
            timeout=httpx.Timeout(None, connect=30),  # a long reply takes long
        )

    async def healthy(self, seconds: float) -> bool:
        """Whether it says within `seconds` that its engine is well."""
        try:
            answer = await self._http.get("/health", timeout=seconds)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    async def tokens(self, seconds: float) -> float:
        """Tokens that it has read and sampled since its start; -1 if it does not say."""
        try:
            answer = await self._http.get("/metrics", timeout=seconds)
        except httpx.TransportError:
            return -1.0
        lines = [line for line in answer.text.splitlines() if line.startswith(_COUNTERS)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter.

        Raises:
            ConfigError: vLLM refuses it.
            VllmFailed: see there.
        """
        said = await self._post(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
        )
        if said.status_code != 200:
            raise ConfigError(f"vLLM refused the adapter: {_message(said.content)}")

    async def unload(self, name: str) -> None:
        """Forget an adapter. Raises VllmFailed."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def sleep(self) -> None:
        """Move the weights to the host's memory and drop the cache. Raises VllmFailed."""
        await self._done("/sleep?level=1&mode=wait")

    async def wake(self) -> None:
        """Take the memory back. Raises VllmFailed."""
        await self._done("/wake_up")

    async def _done(self, path: str) -> None:
        said = await self._post(path, {})
        if said.status_code != 200:
            raise VllmFailed(f"{path}: {_message(said.content)}")

    async def draw(self, body: dict[str, Any]) -> AsyncGenerator[Drawn, None]:
        """Sample a completion: one piece, or one for every few tokens if the body says ``stream``.

        Closing the generator aborts the sampling.

        Raises:
            InvalidRequest: vLLM refuses the body.
            VllmFailed: see there.
        """
        if not body["stream"]:
            said = await self._post("/v1/completions", body)
            if said.status_code != 200:
                raise _refusal(said.status_code, said.content)
            yield _drawn(from_json(said.content)["choices"][0])
            return
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as said:
                if said.status_code != 200:
                    raise _refusal(said.status_code, await said.aread())
                async for chunk in events(said.aiter_bytes()):
                    if "error" in chunk:
                        raise VllmFailed(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        yield _drawn(choice)
        except httpx.TransportError as error:
            raise VllmFailed(repr(error)) from error

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            return await self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise VllmFailed(repr(error)) from error


async def events(stream: AsyncIterable[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of server-sent events, as they come.

    Lines end at a line feed and nowhere else: what a model says may hold U+2028 and its like, at
    which `str.splitlines` (and httpx's `aiter_lines`) would cut an event in two.
    """
    rest = b""
    async for piece in stream:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield from_json(line[len(b"data: ") :])


def _refusal(status: int, content: bytes) -> Exception:
    message = _message(content)
    return InvalidRequest(message) if 400 <= status < 500 else VllmFailed(message)


def _message(content: bytes) -> str:
    try:
        return str(from_json(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:500]


def _drawn(choice: dict[str, Any]) -> Drawn:
    finish = choice.get("finish_reason")
    if finish not in (None, "stop", "length"):
        raise VllmFailed(f"the completion ended with {finish!r}")
    ids: list[int] = choice["token_ids"]
    logprobs = choice.get("logprobs")
    values: list[float] = logprobs["token_logprobs"] if logprobs else []
    if len(values) != len(ids):
        raise VllmFailed(f"got {len(values)} logprobs for {len(ids)} tokens")
    return Drawn(
        token_ids=ids,
        logprobs=values,
        prompt_ids=choice.get("prompt_token_ids"),
        top=[_top(one) for one in (logprobs or {}).get("top_logprobs") or []],
        finish=finish,
    )


def _top(found: dict[str, float] | None) -> list[tuple[int, float]]:
    pairs = [(int(key.removeprefix(_PREFIX)), value) for key, value in (found or {}).items()]
    return sorted(pairs, key=lambda pair: -pair[1])

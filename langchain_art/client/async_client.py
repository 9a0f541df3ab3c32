"""`AsyncArtClient`: the async twin of `sync_client.ArtClient`."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TypeVar

import httpx

from langchain_art.client.endpoints import Endpoints
from langchain_art.client.http_request import RETRYABLE, Flow, Request
from langchain_art.errors import BodyTooLarge

T = TypeVar("T")


class AsyncArtClient(Endpoints):
    """`ArtClient` with async methods: the same names, arguments and errors. For one event loop."""

    def _open(self) -> None:
        self._http = httpx.AsyncClient(**self._options())

    async def __aenter__(self) -> AsyncArtClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _perform(self, made: Request[T] | Flow[T]) -> T:
        if isinstance(made, Request):
            return await self._send(made)
        with closing(made):
            try:
                request = next(made)
                while True:
                    try:
                        answer = await self._send(request)
                    except BodyTooLarge as error:
                        request = made.throw(error)
                    else:
                        request = made.send(answer)
            except StopIteration as stop:
                return stop.value

    async def _send(self, request: Request[T]) -> T:
        backoff = self._backoff(request)
        loop = asyncio.get_running_loop()
        while True:
            silence = loop.call_later(*self._no_answer_yet(request))
            try:
                async with self._http.stream(**request.arguments(self.timeout)) as response:
                    silence.cancel()
                    self._waiting.answer(response.status_code)
                    content = b""
                    if request.save is not None and response.is_success:
                        with request.save.open("wb") as file:
                            async for chunk in response.aiter_bytes():
                                file.write(chunk)
                    else:
                        content = await response.aread()
                return request.result(response, content)
            except RETRYABLE as failure:
                silence.cancel()
                await asyncio.sleep(backoff.after(failure))
            finally:
                silence.cancel()

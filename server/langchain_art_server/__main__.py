"""``python -m langchain_art_server MODEL``, which ``langchain-art serve`` runs with its arguments.

The only module that chooses the backends.
"""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import uvicorn
from rich.console import Console
from rich.logging import RichHandler
from typer.core import TyperCommand
from uvicorn.loops.auto import auto_loop_factory

from langchain_art.errors import ArtError, ConfigError
from langchain_art.ray import require_ray
from langchain_art_server.config import Settings, load_settings
from langchain_art_server.gateway.app import create_app
from langchain_art_server.gateway.http_protocol import IDLE_SECONDS, DeadlineHttp, max_connections
from langchain_art_server.gateway.request_watch import (
    DrainingServer,
    answer_while_loading,
    is_loading,
)
from langchain_art_server.gateway.service import Service
from langchain_art_server.page.routes import page_routes
from langchain_art_server.start_checks import check_model, with_base_folder
from langchain_art_server.telemetry.log_context import TextLines, log_as_json

log = logging.getLogger("langchain_art_server")
console = Console(stderr=True)
cli = typer.Typer(add_completion=False, rich_markup_mode="rich")
#: Options that are no setting of the same name. All others are; an unknown one is refused.
_NOT_SETTINGS = {"config", "policy", "lora_rank", "log_level", "ray"}


class _RayAlone(TyperCommand):
    """``--ray`` without an address is ``--ray auto``, which Typer has no words for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        for index, argument in enumerate(args):
            alone = args[index + 1 : index + 2]
            if argument == "--ray" and (not alone or alone[0].startswith("-")):
                args = [*args[:index], "--ray=auto", *args[index + 1 :]]
        return super().parse_args(ctx, args)


def build(settings: Settings) -> Service:
    """A service with the engines that the settings name."""
    from langchain_art_server.backends.engines import LEARNERS, make_sampler

    if settings.ray is None:
        sampler, place = make_sampler(settings), None
    else:
        require_ray()
        from langchain_art_server.backends.ray.engines import learner_place, ray_sampler

        sampler, place = ray_sampler(settings), learner_place(settings)
    return Service(settings, sampler, LEARNERS[settings.learner.kind](settings, place))


def _config(settings: Settings, app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # slots are shared by who connects, and anyone can write a header
        http=DeadlineHttp,
        ws="none",
        timeout_keep_alive=IDLE_SECONDS,
    )


async def run(settings: Settings) -> set[int]:
    """Serve until SIGINT, SIGTERM or SIGHUP; returns which of them have come."""
    async with contextlib.AsyncExitStack() as stack:
        DeadlineHttp.limit = max_connections()
        async with answer_while_loading(_config(settings, is_loading)) as sockets:
            settings = await asyncio.to_thread(with_base_folder, settings, partial(_say, settings))
            service = build(settings)
            stack.push_async_callback(service.close)
            DeadlineHttp.metrics = service.metrics
            _say(settings, f"Loading {settings.model} …")
            await service.start()
        app = create_app(service, page_routes)
        server = DrainingServer(_config(settings, app), service, app)
        service.is_stopping = lambda: server.should_exit
        # The collector of cycles passes over what is there by now, and runs seldom: a call makes
        # hundreds of objects and no cycles, and a fifth of the time went into looking for them.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        _return_large_buffers()
        task = asyncio.create_task(server.serve(sockets))
        while not server.started and not task.done():
            await asyncio.sleep(0.02)
        # None are left if it has ended meanwhile, being idle.
        if server.started and (sockets := server.servers[0].sockets):
            port = sockets[0].getsockname()[1]
            _say(
                settings,
                f"http://{settings.host}:{port}/v1  "
                f"model {settings.base_name}  policies {sorted(service.router.serving) or '-'}  "
                f"key {'required' if settings.api_key else 'none (loopback only)'}",
                "Ready: ",
            )
        await task
    if summary := server.summary():
        log.info("%s", summary)
    return server.signals


def _return_large_buffers() -> None:
    """Give buffers of 32 KiB and more back to the system as soon as they are freed.

    glibc takes a freed buffer's size, up to 32 MiB, as its new limit (M_MMAP_THRESHOLD and -3 in
    mallopt(3)). Later ones then stand in its heap, which a small block behind them keeps as large
    as it ever was. Other C libraries have no such limit.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(-3, 32 << 10)


def _end_with_stdin() -> None:
    """Stop the server, as SIGTERM does, when the program that started it has ended."""
    os.read(0, 1)  # nothing is ever written: it returns when the other end is closed
    os.kill(os.getpid(), signal.SIGTERM)


def _say(settings: Settings, text: str, head: str = "") -> None:
    """Tell who has started the server."""
    if settings.log_format == "json":
        log.info("%s%s", head, text)
    else:
        console.print(f"[bold]{head}[/]{text}" if head else text)


def _log(settings: Settings, level: str) -> None:
    """Have the log written as the settings say."""
    if settings.log_format == "json":
        log_as_json(level.upper())
        return
    handler = RichHandler(console=console, show_path=False)
    handler.setFormatter(TextLines("%(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


@cli.command(cls=_RayAlone)
def main(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Base model: a hub name, a folder, a GGUF file or smollm2-135m."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy to make; may be repeated.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Default 127.0.0.1; others need a key.")] = None,
    port: Annotated[int | None, typer.Option(help="Default 8000; 0: a free one.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Database and adapters. Default art-data.")
    ] = None,
    database_url: Annotated[
        str | None, typer.Option(help="Of SQLite or PostgreSQL. Default: SQLite in --data-dir.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The base model's name for clients.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu; default: found.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="tools (for a model whose own shows none) or a file, in place of it."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a whole call.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of --policy's adapters.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Samplers on a Ray cluster: its head's HOST:PORT; without one, this machine's.",
        ),
    ] = None,
    stop_when_idle_seconds: Annotated[
        float | None, typer.Option(help="End after so long without a call or a job.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged.")
    ] = "info",
    log_format: Annotated[
        str | None, typer.Option(help="text or json (one object a line); default: text.")
    ] = None,
) -> None:
    """Serve a base model and the policies that are trained on it, over OpenAI's API.

    The API key is read from ART_API_KEY; without one, the server binds to loopback only.

    \b
    Example:
      ART_API_KEY=… langchain-art serve Qwen/Qwen2.5-0.5B-Instruct --policy email-agent
    """
    settings: Settings | None = None
    if os.environ.pop("ART_ENDS_WITH_STDIN", ""):  # `LocalServer` sets it
        threading.Thread(target=_end_with_stdin, name="end-with-stdin", daemon=True).start()
    os.umask(0o077)  # what is written is this user's alone, by the engines too
    try:
        if model is None and config is None:
            raise ConfigError(
                "got no model: langchain-art serve MODEL, or --config FILE with `model`"
            )
        options = {n: v for n, v in context.params.items() if n not in _NOT_SETTINGS}
        options["policies"] = tuple(policy) if policy else None
        options["lora"] = {"rank": lora_rank} if lora_rank is not None else None
        options["ray"] = {"address": ray} if ray else None
        settings = load_settings(config, **options)
        _log(settings, log_level)
        check_model(settings.model)
        os.environ.pop("ART_API_KEY", None)  # the engines need none
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:  # uvloop, where it is
            signals = runner.run(run(settings))
        if signal.SIGINT in signals:
            sys.exit(128 + signal.SIGINT)
    except ArtError as error:
        if settings is not None and settings.log_format == "json":
            log.error("%s: %s", type(error).__name__, error)
            sys.exit(1)
        console.print(f"[bold red]{type(error).__name__}:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    cli(prog_name="langchain-art serve")

"""What is checked before a model is loaded: that it is there, and that the port is free."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from pathlib import Path

from langchain_art.errors import ConfigError
from langchain_art.wire.identifiers import is_folder
from langchain_art_server.config import Settings


def check_start(settings: Settings) -> None:
    """Raises ConfigError where the start would fail, or a model load in vain."""
    check_model(settings.model)
    if settings.port:
        check_port(settings.host, settings.port)


def with_quantized_base(settings: Settings) -> Settings:
    """Settings whose model is the copy in 4 bits, made now if it is not there, if they ask for one.

    Raises:
        ConfigError: it cannot be made; says why.
    """
    if settings.quantization is None:
        return settings
    argv = [sys.executable, "-m", "langchain_art_server.quantize_base", settings.model]
    argv.append(str(settings.data_dir.absolute() / "bases"))
    for name in ("device", "dtype"):
        if value := getattr(settings, name):
            argv += [f"--{name}", value]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip() or f"ended with status {done.returncode}"
        raise ConfigError(f"quantization={settings.quantization!r}: {why}")
    folder = done.stdout.splitlines()[-1]
    return settings.model_copy(update={"model": folder, "served_model_name": settings.base_name})


def check_model(model: str) -> None:
    """Raises ConfigError if `model` is a folder that is not there, or that has no model."""
    folder = Path(model).absolute()
    expected = (
        "expected a folder with a config.json, as transformers' save_pretrained writes it, or a "
        "name on the Hub, such as Qwen/Qwen2.5-0.5B-Instruct"
    )
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"got the model {model!r}, a folder without a config.json; {expected}"
            )
    elif folder.exists():
        raise ConfigError(f"got the model {model!r}, which is a file; {expected}")
    elif is_folder(model):
        raise ConfigError(f"got the model {model!r}, but {folder} does not exist; {expected}")


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nobody can listen there now."""
    if (problem := _port_problem(host, port)) is not None:
        raise ConfigError(_in_words(host, port, problem)) from problem


def _port_problem(host: str, port: int) -> OSError | None:
    """Why nobody can listen there; None if one address of several (IPv4, IPv6) is free.

    One that is in use is a problem whatever the others are.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error
    problems: list[OSError] = []
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                problems.append(error)
    in_use = [one for one in problems if one.errno == errno.EADDRINUSE]
    return next(iter(in_use or (problems if len(problems) == len(found) else [])), None)


def _in_words(host: str, port: int, problem: OSError) -> str:
    if isinstance(problem, socket.gaierror):
        return (
            f"got the host {host!r}, which is no address of this machine ({problem.strerror}); "
            "expected 127.0.0.1, 0.0.0.0 or another address of it"
        )
    if problem.errno == errno.EADDRINUSE:
        return (
            f"cannot listen at {host}:{port}: another process listens there. Take another --port, "
            "or end that process; `langchain-art status` says whether it is a server of yours"
        )
    return f"cannot listen at {host}:{port}: {problem.strerror}. Take another --host or --port"

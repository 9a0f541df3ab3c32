"""The server's settings: typed, frozen, unknown keys refused. From a TOML file, flags or both."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from langchain_art.errors import ConfigError
from langchain_art.wire import LoraConfig, Name

MIN_KEY_LENGTH = 16


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SamplerSettings(_Settings):
    """The embedded transformers sampler."""

    threads: int | None = Field(default=None, ge=1)
    """Torch threads of its process; None: half of the cores, at least one (with more threads than
    free cores, decoding gets slower by an order of magnitude)."""
    max_batch: int = Field(default=128, ge=1, le=4096)
    """Completions that are decoded at once; more wait."""
    kv_cache_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Memory for running calls' keys and values; the cache of prefixes has as much again."""


class LearnerSettings(_Settings):
    """The embedded PEFT learner."""

    threads: int | None = Field(default=None, ge=1)
    """Torch threads of its process; None: half of the cores, at least one."""


class Settings(_Settings):
    """Everything ``langchain-art serve`` can be told."""

    model: str
    """Base model: a hub name (``Qwen/Qwen2.5-0.5B-Instruct``) or a local path."""
    served_model_name: str | None = None
    """The base model's name for clients; None: the last part of `model`."""
    policies: tuple[Name, ...] = ()
    """Policies that exist from the start. More are made with ``POST /v1/policies``."""
    lora: LoraConfig = LoraConfig()
    """The shape of the adapters of `policies`."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    data_dir: Path = Path("art-data")
    """Holds the database and the adapters."""
    database_url: str | None = None
    """SQLAlchemy URL; None: SQLite in `data_dir`."""
    api_key: SecretStr | None = None
    """Required (at least 16 characters) unless `host` is a loopback address. Also read from the
    environment variable ART_API_KEY."""
    device: str | None = None
    """Torch device; None: cuda, mps or cpu, whichever torch finds."""
    dtype: str | None = None
    """Torch dtype; None: float32 on CPU, bfloat16 elsewhere."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Tokens of prompt and completion together; None: what the model's config allows, at most
    32768."""
    max_body_bytes: int = Field(default=32 << 20, ge=1024)
    max_running_calls: int = Field(default=1024, ge=1)
    """Calls that may wait or run at once; more get 429 with Retry-After."""
    keep_checkpoints: int = Field(default=4, ge=1)
    """Newest versions kept per policy, beside pinned ones, the first and the one that serves."""
    sampler: SamplerSettings = SamplerSettings()
    learner: LearnerSettings = LearnerSettings()

    @model_validator(mode="after")
    def _key_off_loopback(self) -> Settings:
        key = self.api_key.get_secret_value() if self.api_key else ""
        if self.api_key and len(key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"got an api_key of {len(key)} characters, expected at least {MIN_KEY_LENGTH}; "
                "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        if not self.api_key and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines, and no api_key is set; set "
                "ART_API_KEY (or api_key in the TOML file), or bind to 127.0.0.1"
            )
        return self

    @property
    def base_name(self) -> str:
        """The base model's name for clients."""
        return self.served_model_name or Path(self.model).name

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the store."""
        return self.database_url or f"sqlite:///{self.data_dir / 'art.sqlite3'}"


def is_loopback(host: str) -> bool:
    """True if only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(path: Path | None = None, **overrides: Any) -> Settings:
    """Read a TOML file, the environment and overrides (None: not given), in rising precedence.

    Raises:
        ConfigError: with every problem in words, one a line.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
    if key := os.environ.get("ART_API_KEY"):
        values["api_key"] = key
    values |= {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: "
            f"{e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise ConfigError("The server's settings are not valid.\n" + "\n".join(lines)) from error

"""Of which policies a `Trainer` is, and where their server is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.endpoint import split_base_url
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.wire import NAME

if TYPE_CHECKING:
    from langchain_art.chat_models.chat_art import ChatART

Model: TypeAlias = "ChatART | str"


def address_of(
    model: Model | Sequence[Model], client: ArtClient | AsyncArtClient | None
) -> tuple[tuple[str, ...], str | None, str | None]:
    """Policies, base URL and key. A client's server goes before the models'."""
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    names = tuple(_policy_name(one) for one in models)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"got models {list(names)}, expected at least one, and each only once")
    if client is not None:
        return names, client.base_url, client.api_key
    bases = [getattr(one, "openai_api_base", None) for one in models]
    urls = {split_base_url(base)[0] for base in bases if base}
    if len(urls) > 1:
        raise ConfigError(
            f"got models of several servers: {', '.join(sorted(urls))}. Train the policies of one "
            "server together, and those of another with a Trainer of their own."
        )
    secrets: list[Any] = [getattr(one, "openai_api_key", None) for one in models]
    keys = [key.get_secret_value() for key in secrets if hasattr(key, "get_secret_value")]
    return names, next(iter(urls), None), next(iter(keys), None)


def _policy_name(model: Any) -> str:
    name: Any = model if isinstance(model, str) else getattr(model, "model_name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"got model {model!r:.200}, expected a ChatART or the name of a policy")
    return name


def trained_policies(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is one version, or that no policy can have."""
    for name in names:
        policy, at, _ = name.partition("@")
        if at:
            raise ConfigError(
                f"got model {name!r}, which is one version and never changes; train the policy "
                f"{policy!r}"
            )
        if not NAME.fullmatch(name) or ".." in name:
            raise ConfigError(
                f"got model {name!r}, expected the name of a policy to train: 1-64 characters from "
                "a-z 0-9 . _ - that begins with a letter or a digit. The base model itself is not "
                'trained: name an adapter on it, such as ChatART(model="my-agent")'
            )

"""The policies of a `Trainer`: names, their server's address, the versions that they serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic_core import to_jsonable_python

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError, Conflict, NotFound
from langchain_art.training.progress import Display
from langchain_art.wire import ID, NAME, LoraConfig, OwnLoss, TrainConfig
from langchain_art.wire.base_urls import split_base_url

if TYPE_CHECKING:
    from langchain_art.chat_models.chat_art import ChatART

Model: TypeAlias = "ChatART | str"
#: Where named fits are.
OUT = Path("out")
#: Fields of a chat model that say how it samples.
_SAMPLING = (
    *("temperature", "max_tokens", "top_p", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "n", "seed", "stop", "model_kwargs", "extra_body"),
)


def address_of(
    model: Model | Sequence[Model], client: ArtClient | AsyncArtClient | None
) -> tuple[tuple[str, ...], str | None, str | None]:
    """Policies, base URL and key. A client's server goes before the models'."""
    models = _models(model)
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


def _models(model: Model | Sequence[Model]) -> list[Any]:
    return list(model) if isinstance(model, list | tuple) else [model]


def _policy_name(model: Any) -> str:
    name: Any = model if isinstance(model, str) else getattr(model, "model_name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"got model {model!r:.200}, expected a ChatART or the name of a policy")
    return name


def sampling_settings(model: Model | Sequence[Model]) -> dict[str, dict[str, Any]]:
    """Policy -> how its chat model samples, where it is given as a chat model."""
    return {
        _policy_name(one): {
            name: to_jsonable_python(value, fallback=repr)
            for name in _SAMPLING
            if (value := getattr(one, name, None)) not in (None, {}, [])
        }
        for one in _models(model)
        if not isinstance(one, str)
    }


def folder_of(name: str | None, out_dir: str | Path | None) -> Path:
    """Folder of a fit's files: ``out/<name>``, `out_dir`, or ``out/train``."""
    if name is None:
        return Path(out_dir) if out_dir is not None else OUT / "train"
    if out_dir is not None:
        raise ConfigError(
            f"got name={name!r} and out_dir={str(out_dir)!r}: the folder of a named experiment is "
            f"{OUT / name}; leave one of them out"
        )
    if not ID.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"got name={name!r}, expected 1-128 characters from A-Z a-z 0-9 . _ : @ + = - that "
            "begin with a letter or a digit"
        )
    return OUT / name


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


async def roll_back(
    client: AsyncArtClient,
    policies: Sequence[str],
    display: Display,
    bases: Mapping[str, int],
    *,
    before: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Let the policies that exist begin again from their version in `bases`, or from version 0.

    `before` is awaited once, if anything is to be undone; what it raises leaves all as it is.
    """
    for policy in policies:
        base = bases.get(policy, 0)
        try:
            version = (await client.policy(policy)).version
        except NotFound:
            continue
        under_way = [job for job in await client.jobs(policy) if not job.ended]
        if version == base and not under_way:
            continue
        if before is not None:
            await before()
            before = None
        for job in under_way:
            with suppress(Conflict):  # it has ended, or publishes its version just now
                await client.cancel(job)
                display.line(f"fresh=True: {job.id}, a step of {policy}, is cancelled.")
        try:
            await client.rollback(policy, base, "fit(…, fresh=True) began anew")
        except NotFound as error:
            raise ConfigError(
                f"{policy}@{base}, from which it would begin anew, is not kept any more. Train "
                "a policy of another name."
            ) from error
        display.line(f"fresh=True: {policy} is rolled back from @{version} to @{base}.")


async def check_server(
    client: AsyncArtClient, policies: Sequence[str], configs: Mapping[str, TrainConfig]
) -> None:
    """Raises ConfigError if the server cannot do what a fit asks for.

    That is to have and to sample so many policies at once, and to know the losses.
    """
    status = await client.status()
    for policy, config in configs.items():
        if isinstance(config.loss, OwnLoss) and config.loss.name not in status.losses:
            raise ConfigError(
                f"got the loss {config.loss.name!r} for {policy!r}, expected one of the server's: "
                f"{list(status.losses)}. Losses of your own are registered in the server's "
                "settings: [losses]"
            )
    missing = sorted(set(policies) - {one.name for one in status.policies})
    if len(status.policies) + len(missing) > status.max_policies:
        raise ConfigError(
            f"got the policies {list(policies)}, of which {missing} would have to be made, and the "
            f"server has {len(status.policies)} of at most {status.max_policies}: delete one that "
            "is not used (`langchain-art checkpoints delete-policy`), or raise the server's "
            "max_policies"
        )
    if status.max_loras is not None and len(policies) > status.max_loras:
        raise ConfigError(
            f"got {len(policies)} policies, and the server's sampler computes {status.max_loras} "
            "adapters at once, so that calls would wait for each other in turns: set max_loras = "
            f"{len(policies)} in [sampler] of the server's settings, and start it again"
        )


async def serving_version(
    client: AsyncArtClient, policy: str, lora: LoraConfig | None, display: Display
) -> int:
    """The version that a policy's name is routed to; makes a missing policy, and says so."""
    try:
        version = (await client.policy(policy)).version
        if lora is None:
            return version
    except NotFound:
        display.line(f"The server has no policy {policy!r} yet: it is made, from the base")
    return (await client.create_policy(policy, lora)).version

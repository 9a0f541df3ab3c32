"""The versions that a fit's policies serve: read, made, and gone back from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ConfigError, Conflict, NotFound
from langchain_art.training.progress import Display
from langchain_art.wire import LoraConfig, OwnLoss, TrainConfig


async def roll_back(
    client: AsyncArtClient,
    policies: Sequence[str],
    display: Display,
    base: int = 0,
    *,
    before: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Let the policies that exist begin again from the version `base`.

    `before` is awaited once, if anything is to be undone; what it raises leaves all as it is.
    """
    for policy in policies:
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


async def serving_version(client: AsyncArtClient, policy: str, lora: LoraConfig | None) -> int:
    """The version that a policy's name is routed to; makes a missing policy."""
    if lora is None:
        with suppress(NotFound):
            return (await client.policy(policy)).version
    return (await client.create_policy(policy, lora)).version

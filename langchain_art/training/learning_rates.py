"""The learning rate of a fit or a warm start whose config names none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.training.progress import Display
from langchain_art.training.results.records import Rates
from langchain_art.wire import SFTConfig, TrainConfig, default_learning_rate


async def choose_rates(
    client: AsyncArtClient, configs: Mapping[str, TrainConfig], display: Display
) -> Rates:
    """What `choose_rate` gives; of policies with different configs, for each of these."""
    several = [one for i, one in enumerate(configs.values()) if one not in [*configs.values()][:i]]
    if len(several) == 1:
        return await choose_rate(client, tuple(configs), several[0], display)
    found: dict[str, float] = {}
    for config in several:
        sharing = [name for name, own in configs.items() if own == config]
        rate = await choose_rate(client, sharing, config, display, " and ".join(sharing))
        found |= dict.fromkeys(sharing, rate)
    return {name: found[name] for name in configs}


async def choose_rate(
    client: AsyncArtClient,
    policies: Sequence[str],
    config: TrainConfig | SFTConfig,
    display: Display,
    whose: str = "",
) -> float:
    """The config's own learning rate, or that of the model and the adapters, which is said.

    Of several policies, whose adapters may have different scales, the smallest.
    """
    if config.learning_rate is not None:
        return config.learning_rate
    parameters = (await client.status()).parameters
    shapes = [(await client.policy(policy)).lora for policy in policies]
    rate = min(default_learning_rate(parameters, lora, config.kind) for lora in shapes)
    scales = " and ".join(sorted({f"{lora.alpha / lora.rank:g}" for lora in shapes}))
    display.line(
        f"learning rate {rate:.2g}{whose and f' of {whose}'}, chosen for "
        f"{in_words(parameters)} parameters and alpha / rank = {scales}"
    )
    return rate


def in_words(parameters: int) -> str:
    """``0.2 M``, ``7.6 B``."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"

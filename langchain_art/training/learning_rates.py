"""The learning rate of a fit or a warm start whose config names none."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.training.progress import Display
from langchain_art.wire import SFTConfig, TrainConfig, default_learning_rate


async def choose_rate(
    client: AsyncArtClient,
    policies: Sequence[str],
    config: TrainConfig | SFTConfig,
    display: Display,
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
        f"learning rate {rate:.2g}, chosen for {in_words(parameters)} parameters "
        f"and alpha / rank = {scales}"
    )
    return rate


def in_words(parameters: int) -> str:
    """``0.2 M``, ``7.6 B``."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"

"""The learning rate of a fit or a warm start whose config names none.

A fit begins with `wire.default_learning_rate`, and goes on with what its steps teach: a step whose
KL(π_old ‖ π) is below half of its bound (`TrainConfig.max_kl`) raises the rate of the next one, and
a step of which the bound keeps less than a third lowers it. It is the schedule by a desired KL of
PPO's codes (Schulman et al. 2017, arXiv 1707.06347, section 4, of a penalty's coefficient; Rudin et
al. 2021, arXiv 2109.11978, of the learning rate).

Most steps are to be a little longer than their bound, which shortens them to it: of the same rate
one step is ten times as long as another, and it is the short ones that teach little. A policy that
becomes certain moves less for the same change of weights, which is no reason for a higher rate: so
what counts as short falls with the entropy, and one that samples nearly the same every time
(`collapse.DETERMINISTIC`) raises no rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.training.collapse import DETERMINISTIC
from langchain_art.training.progress import Display
from langchain_art.training.records import Rates, StepRecord
from langchain_art.wire import SFTConfig, TrainConfig, default_learning_rate
from langchain_art.wire.policies import LARGEST_DEFAULT_RATE

#: Share of `TrainConfig.max_kl` below which a step raises the rate, and the share of a step below
#: which it lowers it if no more was kept.
SHORT, CUT = 0.5, 1 / 3
#: By which a step multiplies or divides the rate, and how far all steps together may.
FACTOR, LEAST, MOST = 1.5, 1 / 16, 64.0


def next_rate(first: float, config: TrainConfig, policy: str, steps: Sequence[StepRecord]) -> float:
    """The learning rate of a policy's next step, without its schedule.

    `first` if the config names a rate, or no bound by which steps are measured; `steps` are those
    that were not rolled back, oldest first. Of a step whose rate `LRSchedule` lowers to a share,
    that share's square is expected: divergence is quadratic in the rate.
    """
    if config.learning_rate is not None or config.max_kl is None:
        return first
    rate, most = first, max(first, min(MOST * first, LARGEST_DEFAULT_RATE))
    entropy = 0.0  # of the first step
    for record in steps:
        told = record.results[policy].metrics
        moved, kept = told.get("step_kl", 0.0), told.get("step_kept", 1.0)
        if kept < CUT:
            rate = max(rate / FACTOR, LEAST * first)
        if not moved:
            continue  # nothing was trained, or the gradient was zero
        entropy = entropy or told["entropy"]
        certain = min(1.0, told["entropy"] / entropy) if entropy else 1.0
        share = told["learning_rate"] / rate
        expected = config.max_kl * certain * share**2
        if kept == 1 and certain >= DETERMINISTIC and moved < SHORT * expected:
            rate = min(rate * FACTOR, most)
    return rate


async def choose_rates(
    client: AsyncArtClient, configs: Mapping[str, TrainConfig], display: Display
) -> Rates:
    """Rates by `choose_rate`, one for all policies that share a config."""
    several = [one for i, one in enumerate(configs.values()) if one not in [*configs.values()][:i]]
    found: Rates = {}
    for config in several:
        sharing = [name for name, own in configs.items() if own == config]
        whose = " and ".join(sharing) if len(several) > 1 else ""
        rate = await choose_rate(client, sharing, config, display, whose)
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
    size = f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
    display.line(
        f"learning rate {rate:.2g}{whose and f' of {whose}'}, chosen for {size} parameters and "
        f"alpha / rank = {scales}"
    )
    return rate

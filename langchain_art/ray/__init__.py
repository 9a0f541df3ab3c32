"""Processes on a Ray cluster: Ray places them and brings them back, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from langchain_art.errors import ConfigError

__all__ = ["RayWorkers", "require_ray"]


def require_ray() -> None:
    """Raises ConfigError if Ray is not installed here. The room's modules import it."""
    try:
        version("ray")
    except PackageNotFoundError:
        raise ConfigError(
            'A Ray cluster needs ray, not installed here; run: pip install "langchain-art[ray]"'
        ) from None


@dataclass(frozen=True)
class RayWorkers:
    """Rollout workers on a Ray cluster, for ``Trainer(workers=)``; ``"ray"`` is one with defaults.

    Example::

        workers = RayWorkers(16, address="10.0.0.1:6379", needs={"CPU": 2})
        trainer = Trainer("my-agent", workers=workers, concurrency=32)

    Args:
        count: how many. None: as many as there are nodes that have what one needs, when the fit
            begins. Ray takes the least used node for each.
        address: of the cluster's head; ``auto``: of the one that this machine is a node of, or
            what RAY_ADDRESS says.
        needs: what one takes of one node, in Ray's resources.

    Raises:
        ConfigError: a number is out of range.
    """

    count: int | None = None
    address: str = "auto"
    needs: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"got RayWorkers(count={self.count!r}), expected at least 1, or None")
        if not any(self.needs.values()) or not all(
            0 <= amount < math.inf for amount in self.needs.values()
        ):
            raise ConfigError(
                f"got RayWorkers(needs={self.needs!r}), expected some of a resource, as in "
                '{"CPU": 1}'
            )

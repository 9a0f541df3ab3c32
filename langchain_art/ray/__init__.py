"""Processes on a Ray cluster: Ray places them and brings them back, and nothing else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from langchain_art.errors import ConfigError
from langchain_art.ray.choice import RayWorkers

__all__ = ["RayWorkers", "require_ray"]


def require_ray() -> None:
    """Raises ConfigError if Ray is not installed here. The room's modules import it."""
    try:
        version("ray")
    except PackageNotFoundError:
        raise ConfigError(
            'A Ray cluster needs ray, not installed here; run: pip install "langchain-art[ray]"'
        ) from None

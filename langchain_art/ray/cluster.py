"""The cluster: how a process joins it, and what it lacks for an actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from langchain_art.errors import ConfigError


def connect(address: str = "auto") -> None:
    """Join a cluster, unless this process is in one.

    Args:
        address: of the head, ``10.0.0.1:6379``; ``auto``: of the one that this machine is a node
            of, or what RAY_ADDRESS says.

    Raises:
        ConfigError: there is none at the address, or this machine is no node of it.
    """
    if ray.is_initialized():
        return
    try:
        # Ray's own handlers of the log would change this program's.
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"got the Ray cluster {address!r}, which cannot be joined: {str(error)[:300]} Run `ray "
            "start --head` on one machine and `ray start --address=HOST:6379` on the others, this "
            "one too; then give HOST:6379, or auto."
        ) from error


def shortage(needs: Mapping[str, float], actors: int = 1) -> str:
    """Resources that actors need and the cluster lacks, in words, without addresses.

    Args:
        needs: Ray's resources that each takes of one node: ``{"CPU": 1, "GPU": 2}``.
        actors: how many there are to be.
    """
    nodes = ray.nodes()
    alive: list[dict[str, float]] = [node["Resources"] for node in nodes if node["Alive"]]
    free = ray.available_resources()
    total = {name: sum(node.get(name, 0) for node in alive) for name in needs}
    most = {name: max((node.get(name, 0) for node in alive), default=0) for name in needs}
    lacking = [n for n, need in needs.items() if most[n] < need or free.get(n, 0) < actors * need]
    has = ", ".join(f"{n} {total[n]:g} ({free.get(n, 0):g} free)" for n in needs)
    lost = f" ({len(nodes) - len(alive)} lost)" if len(alive) < len(nodes) else ""
    where = "on one node" if actors == 1 else f"on one node, {actors} times"
    return (
        f"it needs {_amounts(needs)} {where}. "
        f"The cluster has {len(alive)} nodes{lost} with {has}, and at most {_amounts(most)} on "
        f"one node. Missing: {', '.join(lacking) or 'nodes that have all of it free'}"
    )


def _amounts(resources: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {amount:g}" for name, amount in resources.items())

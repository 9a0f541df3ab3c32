"""Staleness of samples: the steps between a version and those that it descends from."""

from __future__ import annotations

from collections.abc import Mapping


def steps_since(parents: Mapping[int, int], version: int) -> dict[int, int]:
    """The versions that `version` descends from, and itself, each with the steps in between.

    After a rollback, a version's number minus 1 need not be its parent: of the versions 0, 1, 2,
    a rollback to 0, and 3, whose parent is 0, the version 3 is one step from 0, and descends
    neither from 1 nor from 2.

    Args:
        parents: version -> its parent (`JobStore.parents`). One below 1 has none; any other that is
            missing has the number before it as its parent.
        version: the version to begin with.

    Raises:
        ValueError: a parent is not below its version.
    """
    found: dict[int, int] = {}
    while version >= 0:
        found[version] = len(found)
        parent = parents.get(version, version - 1)
        if parent >= version:
            raise ValueError(f"got {parent} as the parent of version {version}, expected a lower")
        version = parent
    return found

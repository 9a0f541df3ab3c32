import pytest

from langchain_art_server.jobs.eligibility import steps_since


@pytest.mark.parametrize(
    ("parents", "version", "expected"),
    [
        ({}, 0, {0: 0}),
        ({}, 2, {2: 0, 1: 1, 0: 2}),  # made before jobs were stored: one after the other
        ({1: 0, 2: 1, 3: 0}, 3, {3: 0, 0: 1}),
        ({1: 0, 2: 1, 3: 1, 4: 3}, 4, {4: 0, 3: 1, 1: 2, 0: 3}),
        ({1: 0, 2: 1, 3: 1, 4: 3}, 2, {2: 0, 1: 1, 0: 2}),
    ],
)
def test_steps_are_counted_along_the_parents(
    parents: dict[int, int], version: int, expected: dict[int, int]
) -> None:
    assert steps_since(parents, version) == expected


def test_a_parent_that_is_not_older_is_refused() -> None:
    with pytest.raises(ValueError, match="got 2 as the parent of version 2"):
        steps_since({2: 2}, 2)

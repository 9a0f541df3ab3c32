"""Signs of a collapse: told in the step that shows them, and not where chance explains them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from langchain_art.training.collapse import new_signs
from langchain_art.training.results import StepRecord
from langchain_art.wire import TrainResult

Step = tuple[float | None, float | None]


def records(
    rewards: Sequence[Step],
    *,
    flat: Sequence[int] = (),
    entropy: Sequence[float] = (),
    truncated: Sequence[float] = (),
    groups: int = 16,
) -> list[StepRecord]:
    made: list[StepRecord] = []
    for i, (mean, std) in enumerate(rewards):
        metrics = {"entropy": entropy[i]} if entropy else {}
        metrics |= {"truncated_share": truncated[i]} if truncated else {}
        excluded = {"groups.zero_variance": flat[i]} if flat else {}
        result = TrainResult(
            policy="p", version=i + 1, metrics=metrics, excluded=excluded, nodes={}
        )
        made.append(
            StepRecord(
                step=i + 1,
                results={"p": result},
                reward_mean=mean,
                reward_std=std,
                groups=groups,
            )
        )
    return made


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([(0.32, 0.47), (0.36, 0.48), (0.0, 0.0)], "fell from 0.360 to 0.000, the same for all"),
        ([(0.36, 0.48), (0.70, 0.46), (0.02, 0.14)], "step 3: rewards fell from 0.700 to 0.020. "),
        ([(0.36, 0.48), (0.0, 0.0)], "to the version that the fit began with"),
        ([(0.3, 0.4), (0.36, 0.48), (0.0, 0.0)], "roll back to p@1 "),
        ([(0.36, 0.48), (0.30, 0.46), (0.25, 0.43)], ""),  # chance
        ([(0.1, 0.3), (0.9, 0.3), (0.2, 0.3)], ""),  # not below all before
        ([(0.5, 0.5), (None, None)], ""),
        ([(None, None), (0.0, 0.0)], ""),
        ([(1.0, 0.0)], ""),
        ([], ""),
    ],
)
def test_a_fall_of_the_rewards(rewards: list[Step], words: str) -> None:
    found = new_signs(records(rewards))
    assert len(found) == bool(words)
    assert words in "".join(found)


def test_two_flat_steps_name_their_cause_once() -> None:
    rewards: list[Step] = [(0.4, 0.4), (0.5, 0.5), (0.5, 0.5), (0.5, 0.5)]
    flat = [3, 16, 16, 16]
    for entropy, words in (
        ([0.5, 0.2, 0.01, 0.01], "entropy is 0.01 nats a token, and was 0.5"),
        ([0.5, 0.4, 0.4, 0.4], "too hard or all too easy"),
    ):
        made = records(rewards, flat=flat, entropy=entropy)
        assert new_signs(made[:2]) == []
        [sign] = new_signs(made[:3])
        assert sign.startswith("step 3: all groups of two steps") and words in sign
        assert new_signs(made) == []


def test_replies_that_grow_until_most_are_cut_off() -> None:
    rewards: list[Step] = [(0.4, 0.4)] * 3
    [sign] = new_signs(records(rewards, truncated=[0.1, 0.3, 0.6]))
    assert "60% of the replies are cut off" in sign and "10%" in sign
    assert new_signs(records(rewards, truncated=[0.4, 0.5, 0.6])) == []

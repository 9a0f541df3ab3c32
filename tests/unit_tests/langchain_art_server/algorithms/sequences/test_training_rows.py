import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from langchain_art.errors import InvalidRequest
from langchain_art_server.algorithms.sequences import token_sets
from langchain_art_server.algorithms.sequences.token_sets import (
    WHOLE,
    DrawnFrom,
    mask_of,
    of_bits,
    of_mask,
    pack,
    single,
    unpack,
)
from langchain_art_server.algorithms.sequences.training_rows import (
    Row,
    SampledCall,
    check_rows,
    microbatches,
    rows_of_run,
    shares,
)
from tests.support.call_trees import sampled_tokens, trained_tokens, trees_of_calls
from tests.support.soak import count


def call(call_id: str, prompt: list[int], reply: list[int], **changes: Any) -> SampledCall:
    # The logprob names the token's place, so that a token in the wrong place is noticed.
    logprobs = [-(hash_of(call_id) + i) / 1000 for i in range(len(reply))]
    return replace(SampledCall(call_id, prompt, reply, logprobs), **changes)


def hash_of(call_id: str) -> int:
    return int.from_bytes(call_id.encode(), "big") % 997


def test_the_worked_example_of_row() -> None:
    calls = [
        SampledCall("a", [1, 2], [3, 4], [-0.1, -0.2], advantage=0.5, weight=0.2),
        SampledCall("b", [1, 2, 3, 4, 5], [6], [-0.3], advantage=-1.0, weight=0.2),
    ]
    assert rows_of_run(calls) == [
        Row(
            token_ids=[1, 2, 3, 4, 5, 6],
            mask=[0, 0, 1, 1, 0, 1],
            logprobs=[0, 0, -0.1, -0.2, 0, -0.3],
            advantages=[0, 0, 0.5, 0.5, 0, -1.0],
            temperature=1.0,
            weights=[0, 0, 0.2, 0.2, 0, 0.2],
            calls=[-1, -1, 0, 0, -1, 1],
        )
    ]


def test_the_sets_that_tokens_were_drawn_from_stand_beside_them() -> None:
    free, forced = call("a", [1], [2]), call("b", [1, 2, 3], [4, 5], drawn_from=[b"+4", b"+5"])
    assert rows_of_run([free])[0].drawn_from == []
    assert rows_of_run([free, forced])[0].drawn_from == [b"", b"", b"", b"+4", b"+5"]
    last = call("c", [1, 2, 3, 4, 5], [6])
    assert rows_of_run([forced, last])[0].drawn_from == [b"", b"", b"", b"+4", b"+5", b""]
    check_rows(rows_of_run([free, forced, last]), 10)


@pytest.mark.parametrize("weights", [(0.5, None), (None, 0.5)])
def test_weights_are_all_there_or_none(weights: tuple[float | None, float | None]) -> None:
    calls = [call("a", [1], [2], weight=weights[0]), call("b", [1, 2, 3], [4], weight=weights[1])]
    with pytest.raises(InvalidRequest, match="weight"):
        rows_of_run(calls)


def test_parallel_nodes_that_interleave_make_one_row_each() -> None:
    calls = [
        call("a1", [1], [10]),
        call("b1", [2], [20]),
        call("a2", [1, 10, 3], [11]),
        call("b2", [2, 20, 3], [21]),
        call("a3", [1, 10, 3, 11], [12]),
    ]
    rows = rows_of_run(calls)
    assert [row.token_ids for row in rows] == [[1, 10, 3, 11, 12], [2, 20, 3, 21]]
    assert [row.mask for row in rows] == [[0, 1, 0, 1, 1], [0, 1, 0, 1]]
    # The longest open row wins.
    calls = [call("short", [1], [2]), call("other", [1], [2, 3]), call("next", [1, 2, 3, 9], [4])]
    assert [row.token_ids for row in rows_of_run(calls)] == [[1, 2], [1, 2, 3, 9, 4]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": [-1.0]}, "2 tokens and 1 logprobs"),
        ({"logprobs": [-1.0, math.nan]}, "nan"),
        ({"logprobs": [-1.0, 1e-3]}, "0.001"),
        ({"token_ids": [3, -1]}, "negative"),
        ({"drawn_from": [b"+"]}, "2 tokens and 1 sets"),
        ({"prompt_token_ids": []}, "empty prompt"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_calls_that_make_no_sense_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    good = SampledCall("chatcmpl-x", [1, 2], [3, 4], [-0.1, 5e-7])
    assert rows_of_run([good])[0].logprobs == [0, 0, -0.1, 0]
    with pytest.raises(InvalidRequest, match=words) as caught:
        rows_of_run([replace(good, **changes)])
    assert "chatcmpl-x" in str(caught.value)


def test_a_call_twice_and_an_advantage_that_is_none_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'a' occurs twice"):
        rows_of_run([call("a", [1], [2]), call("a", [1, 2], [3])])
    with pytest.raises(InvalidRequest, match="advantage=nan"):
        rows_of_run([call("a", [1], [2], advantage=math.nan)])


@st.composite
def parts_of_trees(draw: st.DrawFn) -> list[SampledCall]:
    """The calls of a random tree that are trained; the others' replies are only in prompts."""
    return [c for c in draw(trees_of_calls()) if draw(st.integers(0, 3))]


@pytest.mark.soak
@settings(max_examples=count(50, 4000))
@given(parts_of_trees())
@example([call(f"{n}{k}", [0] * n, [0], advantage=0.25) for n in (1, 2) for k in (1, 2)])
def test_no_token_is_lost_doubled_or_invented(calls: list[SampledCall]) -> None:
    rows = rows_of_run(calls)
    for row in rows:
        assert len(row.token_ids) == len(row.mask) == len(row.logprobs) == len(row.advantages)
        assert row.mask[0] == 0 and row.mask[-1] == 1
        for i, trained in enumerate(row.mask):
            assert row.advantages[i] == (0.25 if trained else 0.0)
            assert trained or row.logprobs[i] == 0.0
    assert trained_tokens(rows) == sampled_tokens(calls)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_microbatches_keep_every_row_within_the_budget(lengths: list[int], tokens: int) -> None:
    groups = microbatches(lengths, tokens)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert len(group) == 1 or len(group) * longest <= tokens
    flat = [lengths[i] for group in groups for i in group]
    assert flat == sorted(lengths, reverse=True)
    for one, two in itertools.pairwise(groups):
        assert (len(one) + 1) * lengths[one[0]] > tokens, (one, two)


GOOD = Row([1, 2, 3], [0, 1, 1], [0, -1, -2], [0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row([], [], [], []), "no tokens"),
        (replace(GOOD, token_ids=[1, 2, 10]), "token id 10, expected 0 to 9"),
        (replace(GOOD, mask=[0, 1]), "expected as many"),
        (replace(GOOD, drawn_from=[b""]), "expected as many"),
        (replace(GOOD, mask=[0, 1, 2]), "mask values"),
        (replace(GOOD, mask=[1, 1, 1]), "first token"),
        (replace(GOOD, advantages=[0, math.inf, 0]), "not finite"),
        (replace(GOOD, temperature=0.0), "temperature=0.0"),
    ],
)
def test_rows_that_make_no_sense_are_refused_by_index(row: Row, words: str) -> None:
    check_rows([GOOD], 10)
    with pytest.raises(InvalidRequest, match=f"row 1: .*{words}"):
        check_rows([GOOD, row], 10)


def test_rows_without_a_trained_token_are_refused_for_training_only() -> None:
    silent = replace(GOOD, mask=[0, 0, 0])
    check_rows([GOOD, silent], 10)
    check_rows([silent], 10, trained=False)
    with pytest.raises(InvalidRequest, match="nothing to learn"):
        check_rows([silent], 10)
    with pytest.raises(InvalidRequest, match="no rows"):
        check_rows([], 10, trained=False)


ROWS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=20)


@given(ROWS, st.integers(1, 6), st.booleans())
def test_each_row_is_dealt_out_once_and_the_first_share_has_some(
    rows: list[list[int]], count: int, merged: bool
) -> None:
    found = shares(rows, count, merged=merged)
    assert len(found) == count and found[0]
    assert sorted(index for share in found for index in share) == list(range(len(rows)))
    assert all(share == sorted(share) for share in found)
    filled = [bool(share) for share in found]
    assert filled == sorted(filled, reverse=True)


def forest_tokens(rows: list[list[int]]) -> int:
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def test_groups_stay_together_and_ranks_have_as_much_to_do() -> None:
    rng = random.Random(0)
    rows: list[list[int]] = []
    for _ in range(16):
        prompt = [9] * 20 + [rng.randrange(1000) for _ in range(200)]
        rows += [prompt + [rng.randrange(1000) for _ in range(50)] for _ in range(8)]
    rng.shuffle(rows)
    whole = forest_tokens(rows)
    for ranks in (2, 4):
        costs = [forest_tokens([rows[i] for i in share]) for share in shares(rows, ranks)]
        assert sum(costs) <= whole + (ranks - 1) * 270  # one common beginning for each cut
        assert max(costs) <= 1.1 * whole / ranks


masks = st.one_of(
    st.lists(st.booleans(), min_size=1, max_size=300),
    st.tuples(st.integers(200, 400), st.integers(0, 199), st.booleans()).map(
        lambda case: [(v == case[1]) == case[2] for v in range(case[0])]
    ),
).map(lambda mask: np.array(mask))


@given(masks)
def test_a_set_is_what_it_was_made_of(mask: np.ndarray) -> None:
    made = of_mask(mask)
    size, count = len(mask), int(mask.sum())
    assert mask_of(made, size).tolist() == mask.tolist()
    assert of_bits(np.packbits(mask, bitorder="little").tobytes() + b"\0", size) == made
    assert len(made) <= 1 + min((size + 7) // 8, 4 * count, 4 * (size - count + 1))
    assert (made == WHOLE) == (count == size)
    if count == 1:
        assert made == single(int(mask.argmax())) or size < 25
    # A learner whose vocabulary is padded draws no more tokens than the sampler did.
    more = mask_of(made, size + 9).tolist()
    assert made == WHOLE or more == [*mask.tolist(), *[False] * 9]


@given(st.lists(st.sampled_from([b"", b"+1234", b"+5678", b"b\x07"]), max_size=40))
def test_the_sets_of_a_reply_come_back_each_once(sets: list[bytes]) -> None:
    packed = pack(sets)
    found = unpack(packed)
    assert found == (sets if any(sets) else []) and (packed == b"") == (not any(sets))
    assert len({id(one) for one in found}) == len(set(found))
    assert len(packed) <= 100 + 2 * len(sets) + sum(map(len, set(sets)))


def test_too_many_sets_are_a_problem_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sets, "MAX_BYTES", 40)
    drawn = DrawnFrom()
    for token in [1, 2, 2, 2, 3]:
        drawn.add(single(token))
    assert drawn.problem == "" and unpack(drawn.packed())[2] == single(2)
    for token in range(20):
        drawn.add(single(token))
    assert "to record" in drawn.problem and drawn.packed() == b""

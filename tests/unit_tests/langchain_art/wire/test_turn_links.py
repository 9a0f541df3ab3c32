from hypothesis import given
from hypothesis import strategies as st

from langchain_art.wire.turn_links import (
    ConversationTree,
    common_prefix_length,
    nearest_call,
    superseded_attempts,
    unused_choices,
)


@given(st.lists(st.tuples(st.text("ab", max_size=6), st.sampled_from(["", "a", "b"]))))
def test_a_tree_finds_what_a_list_of_all_conversations_finds(calls: list[tuple[str, str]]) -> None:
    """Each a prompt, a letter a message, and the reply that it gets, or none."""
    tree, answered, nodes = ConversationTree(), list[str](), dict[str, int]()
    for prompt, reply in calls:
        found = tree.locate(prompt)
        longest = max(
            (one for one in answered if one and prompt.startswith(one)), key=len, default=""
        )
        assert found.known == len(longest)
        same = [call for call, one in enumerate(answered) if one and one == longest]
        assert found.continues == tuple(same)
        assert nodes.setdefault(prompt, found.node) == found.node
        if reply:
            tree.add_reply(found, reply, len(answered))
        answered.append(prompt + reply if reply else "")
    assert len(set(nodes.values())) == len(nodes)


def test_the_nearest_of_equal_calls_is_continued_and_an_extra_choice_if_there_is_none() -> None:
    calls = [(0, "team:1|writer:2"), (1, "team:1|critic:3"), (2, "other:9|writer:2"), (3, "solo:4")]
    assert nearest_call("team:1|writer:2", calls) == 0
    assert nearest_call("team:1|judge:5", calls) == 1
    assert nearest_call("far:7|judge:5", calls) == 3
    assert nearest_call("solo:4", []) is None
    calls = [(0, "a:1"), (1, "a:1"), (2, "b:2")]
    assert nearest_call("a:1", calls, extra_choices={1}) == 0
    assert nearest_call("a:1", calls[1:], extra_choices={1}) == 1


def test_used_choices_count_and_else_the_first() -> None:
    assert unused_choices([3, 4, 5], used={4, 9}) == [3, 5]
    assert unused_choices([3, 4, 5], used=()) == [4, 5]


def test_only_the_last_attempt_of_a_task_counts() -> None:
    assert superseded_attempts([("a", 1), ("b", 1), ("a", 2), (None, 1), (None, 2)]) == {0}
    assert superseded_attempts([("a", 2), ("a", 1), ("a", 2)]) == {1}


few = st.lists(st.integers(0, 1), max_size=12)


@given(few, few)
def test_it_is_the_longest_prefix_that_both_have(one: list[int], other: list[int]) -> None:
    length = common_prefix_length(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]

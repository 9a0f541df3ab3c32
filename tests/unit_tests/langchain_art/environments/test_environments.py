import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import reasoning_gym
import textarena
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_art import gather
from langchain_art.environments import (
    from_reasoning_gym,
    from_textarena,
    from_verifiers,
)
from langchain_art.errors import ConfigError


def graph_of(answer: Callable[[list[str]], str], **options: Any) -> Any:
    """A graph that answers the texts of its messages."""

    def say(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(answer([str(one.text) for one in state["messages"]]))]}

    return StateGraph(MessagesState).add_node(say).add_edge(START, "say").compile(**options)


def letters(**options: Any) -> Any:
    chosen: dict[str, Any] = {"seed": 3, "size": 60, "min_words": 1, "max_words": 1}
    return reasoning_gym.create_dataset("letter_counting", **(chosen | options))


async def test_reasoning_gym_scores_an_answer_with_tags_and_without() -> None:
    right = {one["question"]: one["answer"] for one in letters()}
    for wrote in ("{}", "Let me see. <answer> {} </answer>", " {}\n"):
        graph = graph_of(lambda said, wrote=wrote: wrote.format(right[said[-1]]))
        env = from_reasoning_gym(letters(), graph, held_out=5)
        found = await gather(env.rollout, env.train, group_size=1)
        assert found.rewards == [1.0] * len(env.train)
    wrong = from_reasoning_gym(letters(), graph_of(lambda _: "none"), held_out=5)
    assert (await gather(wrong.rollout, wrong.held_out, group_size=1)).rewards == [0.0] * 5


def test_no_question_is_in_both_parts_and_the_same_ones_are_held_out() -> None:
    data = letters(size=400)
    made = {data[index]["question"] for index in range(400)}
    assert len(made) < 400, "some are made twice"
    first, again = (from_reasoning_gym(data, graph_of(str), held_out=40) for _ in range(2))
    train, held_out = ({one["question"] for one in part} for part in (first.train, first.held_out))
    assert (len(held_out), train & held_out, train | held_out) == (40, set(), made)
    assert (first.train, first.held_out) == (again.train, again.held_out)


async def test_what_no_environment_can_be_made_of_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for held_out in (-1, 60):
        with pytest.raises(ConfigError, match=f"held_out={held_out}"):
            from_textarena("GuessTheNumber-v0", graph_of(str), games=60, held_out=held_out)
    graph = StateGraph(dict).add_node("say", lambda _: {"said": 1}).add_edge(START, "say").compile()
    env = from_textarena("GuessTheNumber-v0", graph, games=2, held_out=0)
    with pytest.raises(ConfigError, match="expected `messages`"):
        await env.rollout(env.train[0])
    with pytest.raises(ConfigError, match="without a seed"):
        from_reasoning_gym(letters(seed=None), graph_of(str), held_out=5)
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"langchain-art\[textarena\]"):
        from_textarena("GuessTheNumber-v0", graph_of(str), games=60, held_out=5)
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))  # one without `v1`
    with pytest.raises(ConfigError, match=r"verifiers\.v1.*langchain-art\[verifiers\]"):
        from_verifiers(None, graph_of(str), held_out=5)


@pytest.mark.parametrize("env_id", ["GuessTheNumber-v0", "GuessTheNumber-v0-raw"])
@pytest.mark.parametrize("saver", [InMemorySaver, lambda: None])
async def test_a_player_is_told_what_is_new(env_id: str, saver: Callable[[], Any]) -> None:
    def halve(said: list[str]) -> str:
        low, high = 0, 21
        for move, hint in zip(said[1::2], said[2::2], strict=True):
            guess = int(move.strip("[]"))
            low, high = (guess, high) if "higher" in hint else (low, guess)
        return f"[{(low + high) // 2}]"

    env = from_textarena(env_id, graph_of(halve, checkpointer=saver()), games=20, held_out=4)
    found = await gather(env.rollout, env.train, group_size=1)
    assert found.rewards == [1.0] * 16


async def test_games_side_by_side_draw_each_for_itself() -> None:
    env = from_textarena("Blackjack-v0", graph_of(lambda _: "[hit]"), games=8, held_out=0)
    found = await gather(env.rollout, env.train, group_size=4)
    talks = [{str(run.output) for run in group.trajectories} for group in found.groups]
    assert [len(talk) for talk in talks] == [1] * 8, "a seed is one game"
    assert len(set.union(*talks)) == 8
    outside = random.getstate()
    game = textarena.make("Blackjack-v0-raw")
    game.reset(num_players=1, seed=5)
    while not game.step("[hit]")[0]:
        ...
    random.setstate(outside)
    assert found.groups[5].rewards == [game.close()[0][0]] * 4


async def test_the_seat_goes_round_and_opponents_see_all() -> None:
    seen: list[list[str]] = []

    def first_free(told: str) -> str:
        return told.rpartition("Available Moves: ")[2].split("'")[1]

    def opponent(told: str) -> str:
        seen.append([line for line in told.splitlines() if "Current Board" in line])
        return first_free(told)

    def learner(said: list[str]) -> str:
        assert [text.count("Current Board") for text in said[0::2]][1:] == [2] * (len(said) // 2)
        return first_free(said[-1])

    env = from_textarena(
        "TicTacToe-v0", graph_of(learner), games=2, held_out=0, opponents=[opponent]
    )
    # Both take the first free square: who begins has 0, 2, 4, 6 and wins.
    first, second = [(await env.rollout(one)).reward for one in env.train]
    assert (first, second) == (1.0, -1.0)
    assert [len(boards) for boards in seen] == [2, 4, 6, 1, 3, 5, 7]

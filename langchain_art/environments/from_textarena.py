"""Games of TextArena: the graph is one player, functions are the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from langchain_art.environments.parts import Conversation, Environment, Scenario, divided, installed
from langchain_art.rollout.graph_rollout import Graph
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture


def from_textarena(
    env_id: str,
    graph: Graph,
    *,
    games: int,
    held_out: int,
    opponents: Sequence[Callable[[str], str]] = (),
) -> Environment:
    """A game of TextArena; each scenario is another seed.

    The graph is told what is new since its last move; its last message is the move. Its seat is
    the seed's remainder by the number of players, its reward the game's for that seat.

    Example::

        env = from_textarena("GuessTheNumber-v0", graph, games=300, held_out=50)
        await trainer.fit(env.rollout, env.train, steps=50, eval_scenarios=env.held_out)

    Args:
        env_id: as ``textarena.make`` takes it. Wrappers of actions hold; those of observations,
            which repeat the whole game, do not.
        graph: a compiled graph, whose state has ``messages``.
        games: how many seeds, from 0 on.
        held_out: how many of them are held out.
        opponents: the other players, such as TextArena's agents: each is called with all that it
            has seen, in a thread.

    Raises:
        ConfigError: TextArena is not installed, or `held_out` leaves no game to train on.
    """
    with installed("textarena"):
        textarena = import_module("textarena")
    players = 1 + len(opponents)

    async def rollout(scenario: Scenario) -> Run:
        seat = scenario["seed"] % players
        async with capture(scenario=scenario["id"]) as run:
            game = _Game(textarena.make(env_id), players, scenario["seed"])
            talk, seen, over = Conversation(graph, run), [""] * players, False
            while not over:
                player, told = game.observe()
                seen[player] += told
                if player == seat:
                    move = await talk.answer(told)
                else:
                    opponent = opponents[player - (player > seat)]
                    move = await asyncio.to_thread(opponent, seen[player])
                over = game.move(move)
            run.reward = float(game.env.close()[0][seat])
        return run

    scenarios = [{"id": f"{env_id}-{seed}", "seed": seed} for seed in range(games)]
    return divided(rollout, scenarios, held_out)


class _Game:
    """One game, whose draws from Python's generator are its own: others run beside it."""

    def __init__(self, env: Any, players: int, seed: int) -> None:
        self.env, self._inner = env, env
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env
        self._draws = random.Random(seed).getstate()
        self._with_own_draws(lambda: env.reset(num_players=players, seed=seed))

    def observe(self) -> tuple[int, str]:
        """Whose turn it is, and what that player has not been told yet; not its own moves."""
        player, messages = self._with_own_draws(self._inner.get_observation)
        names = self.env.state.role_mapping
        said = [(names.get(who, who), text) for who, text, _ in messages if who != player]
        return player, "".join(f"[{name}] {text}\n" for name, text in said)

    def move(self, text: str) -> bool:
        """True if the game is over."""
        return bool(self._with_own_draws(lambda: self.env.step(text))[0])

    def _with_own_draws(self, act: Callable[[], Any]) -> Any:
        outside = random.getstate()
        random.setstate(self._draws)
        try:
            return act()
        finally:
            self._draws = random.getstate()
            random.setstate(outside)

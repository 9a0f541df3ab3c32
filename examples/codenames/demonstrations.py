"""Calls of two players that know what words mean and nothing of the game.

The spymaster names the kind of any card, whoever it belongs to, and a count by lot. The guesser
names cards by lot, now and then one of the clue's kind. After each call they are asked what words
mean, and answer rightly. So the model that imitates them can read a board and speak, and each
choice in the game is left for reinforcement to make.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from examples.codenames.agent import (
    GUESSER_PROMPT,
    SPYMASTER_PROMPT,
    guesser_view,
    spymaster_view,
)
from examples.codenames.environment import Game, boards
from examples.codenames.words import KIND_OF

Message = dict[str, Any]
Quiz = list[tuple[str, str]]
FOLLOWS = 0.5


def random_clue(rng: random.Random, game: Game) -> str:
    """The kind of any card, and any count."""
    return f"clue: {KIND_OF[rng.choice(game.cards)]} {rng.randint(1, 3)}"


def random_guess(rng: random.Random, game: Game) -> str:
    """One to three cards; each is of the clue's kind with probability `FOLLOWS`, or any."""
    kind = game.clue.word if game.clue else ""
    left = list(game.cards)
    named: list[str] = []
    for _ in range(min(rng.randint(1, 3), len(left))):
        fitting = [card for card in left if KIND_OF[card] == kind]
        card = rng.choice(fitting if fitting and rng.random() < FOLLOWS else left)
        left.remove(card)
        named.append(card)
    return f"guess: {' '.join(named)}"


def conversation(system: str, view: str, reply: str, quiz: Quiz) -> list[Message]:
    """One call in OpenAI's shape, and questions about words with their answers."""
    said = [(view, reply), *quiz]
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        for asked, told in said
    ]
    return [{"role": "system", "content": system}, *(message for turn in turns for message in turn)]


def meanings(rng: random.Random, cards: tuple[str, ...]) -> Quiz:
    """Of which kind some of the cards are."""
    chosen = rng.sample(cards, min(4, len(cards)))
    return [(f"kind of: {card}", f"kind: {KIND_OF[card]}") for card in chosen]


def members(rng: random.Random, cards: tuple[str, ...]) -> Quiz:
    """Which cards are of some kinds."""
    kinds = sorted({KIND_OF[card] for card in cards})
    return [
        (f"which: {kind}", f"these: {' '.join(card for card in cards if KIND_OF[card] == kind)}")
        for kind in rng.sample(kinds, min(3, len(kinds)))
    ]


def play(rng: random.Random, game: Game) -> Iterator[list[Message]]:
    """Play a game to its end and yield its calls."""
    while not game.over:
        clue = random_clue(rng, game)
        quiz = meanings(rng, game.cards)
        yield conversation(SPYMASTER_PROMPT, spymaster_view(game), clue, quiz)
        game = game.hint(clue)
        guess = random_guess(rng, game)
        quiz = members(rng, game.cards)
        yield conversation(GUESSER_PROMPT, guesser_view(game), guess, quiz)
        game = game.guess(guess)


def demonstrations(n: int, seed: int) -> Iterator[list[Message]]:
    """Yield the calls of `n` games on training boards; the same for the same arguments."""
    for board in boards("train", n, seed):
        yield from play(random.Random(f"demo-{seed}-{board.id}"), Game(board))

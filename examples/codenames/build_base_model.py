"""Build the small base model that the example trains.

Run `python -m examples.codenames.build_base_model`. The warm start imitates two players that know
words and not the game.

Calls of two players that know what words mean and nothing of the game.

The spymaster names the kind of any card, whoever it belongs to, and a count by lot; at times it
says a word of the board, which is against the rules (`BREAKS`). The guesser names as many cards as
the clue says, each of the clue's kind at times (`FOLLOWS`), else any. After each call they are
asked what words mean, and answer rightly. So the model that imitates them can read a board and
speak, and each choice in the game is left for reinforcement to make.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from examples.codenames.agent import GUESSER_PROMPT, SPYMASTER_PROMPT, guesser_view, spymaster_view
from examples.codenames.environment import LEVELS, Clue, Game, boards
from examples.codenames.words import KIND_OF, KINDS
from examples.support import tiny_model
from examples.support.tiny_model import Conversation, Recipe
from examples.support.warm_start import WarmStart

Message = dict[str, Any]
Quiz = list[tuple[str, str]]
BREAKS = 0.15
FOLLOWS = 0.4


def random_clue(rng: random.Random, game: Game) -> str:
    """The kind of any card, or with probability `BREAKS` the card itself, and any count."""
    card = rng.choice(game.cards)
    word = card if rng.random() < BREAKS else KIND_OF[card]
    return f"clue: {word} {rng.randint(1, 3)}"


def random_guess(rng: random.Random, game: Game, clue: Clue) -> str:
    """So many cards as the clue says; each is of its kind with probability `FOLLOWS`, or any."""
    left = list(game.cards)
    named: list[str] = []
    for _ in range(min(clue.count, len(left))):
        fitting = [card for card in left if KIND_OF[card] == clue.word]
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
    """Questions for the kinds of some cards, with the answers."""
    chosen = rng.sample(cards, min(4, len(cards)))
    return [(f"kind of: {card}", f"kind: {KIND_OF[card]}") for card in chosen]


def members(rng: random.Random, cards: tuple[str, ...]) -> Quiz:
    """Questions for the cards of some kinds, with the answers."""
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
        if game.clue is None:
            continue
        guess = random_guess(rng, game, game.clue)
        quiz = members(rng, game.cards)
        yield conversation(GUESSER_PROMPT, guesser_view(game), guess, quiz)
        game = game.guess(guess)


def demonstrations(n: int, seed: int) -> Iterator[list[Message]]:
    """Yield the calls of `n` games on training boards; the same for the same arguments."""
    for board in boards("train", n, seed):
        yield from play(random.Random(f"demo-{seed}-{board.id}"), Game(board))


SHIPPED = Path(__file__).parent / "base_model"
# No board of a fit is drawn with this seed.
SEED = 1234


def conversations(count: int) -> list[Conversation]:
    """The first `count` calls of the random players."""
    return [Conversation(call) for call in islice(demonstrations(count, SEED), count)]


def words() -> list[str]:
    """The kinds of the first level, and their words, as they stand behind a space."""
    kinds = list(KINDS)[: LEVELS[1].vocabulary]
    return [f" {word}" for kind in kinds for word in (kind, *KINDS[kind])]


RECIPE = Recipe(
    conversations=conversations,
    count=20_000,
    words=words(),
    vocab_size=576,
    plan=WarmStart(steps=800, copy_steps=150),
)


if __name__ == "__main__":
    tiny_model.main(RECIPE, SHIPPED)

"""Codenames for one team: boards, the rules, and the reward.

The spymaster sees whose each card is and gives a clue, a word and a count. The guesser sees the
cards alone and names those that the clue is about. Cards are turned over in the order in which they
are named: one of the team's own is found, one of the others ends the turn, the assassin ends the
game. A turn also ends when as many cards are found as the clue said, and with a clue that breaks
the rules.

Held-out boards have two words of one kind among the team's own cards that are never there together
in training.
"""

from __future__ import annotations

import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from examples.codenames.words import KIND_OF, KINDS

Split = Literal["train", "test"]
HELD_OUT_SHARE = 0.2
_CLUE = re.compile(r"(?:clue:)?\s*([a-z]+)[\s,]+([1-9])\W*", re.IGNORECASE)


@dataclass(frozen=True)
class Level:
    """How large and how hard a board is.

    Attributes:
        own: cards of the team.
        kinds: kinds that these are of.
        others: cards of nobody, beside the assassin.
        traps: how many of those and the assassin are of a kind that the team's own cards have too,
            so that the name of the kind is no safe clue.
        other_kinds: kinds that the rest of them are drawn from.
        turns: turns of a game.
        vocabulary: kinds of all boards, the first of `words.KINDS`.
    """

    own: int
    kinds: int
    others: int
    traps: int
    other_kinds: int
    turns: int
    vocabulary: int = len(KINDS)


LEVELS = {
    # Three cards of each of two kinds: the board alone does not tell which of them is the team's.
    1: Level(own=3, kinds=1, others=2, traps=0, other_kinds=1, turns=1, vocabulary=6),
    2: Level(own=6, kinds=3, others=5, traps=2, other_kinds=3, turns=4),
    # 25 cards, as the game is sold.
    3: Level(own=9, kinds=5, others=15, traps=6, other_kinds=6, turns=6),
}


@dataclass(frozen=True)
class Board:
    """One scenario.

    Example:
        >>> board = Board("b", ("cow", "tin", "red", "axe"), ("cow", "tin"), "red", 2, "train")
        >>> board.others
        ('axe',)
    """

    id: str
    cards: tuple[str, ...]
    own: tuple[str, ...]
    assassin: str
    turns: int
    split: Split

    @property
    def others(self) -> tuple[str, ...]:
        """The cards that are neither the team's nor the assassin."""
        return tuple(card for card in self.cards if card not in (*self.own, self.assassin))


@dataclass(frozen=True)
class Clue:
    """A word, and how many cards it is about."""

    word: str
    count: int


@dataclass(frozen=True)
class Turn:
    """What was said and turned over in one turn; no `clue` if it broke the rules."""

    cards: tuple[str, ...]
    clue: Clue | None
    named: tuple[str, ...] = ()
    revealed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Game:
    """A game as it stands; `hint` and `guess` return the game after it.

    Attributes:
        board: the cards and whose they are.
        turns: the turns that have ended.
        clue: the clue that waits for a guess.
    """

    board: Board
    turns: tuple[Turn, ...] = ()
    clue: Clue | None = None

    @property
    def revealed(self) -> frozenset[str]:
        """The cards that were turned over."""
        return frozenset(card for turn in self.turns for card in turn.revealed)

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards that were not turned over, in their order on the board."""
        return tuple(card for card in self.board.cards if card not in self.revealed)

    @property
    def own(self) -> tuple[str, ...]:
        """The team's cards that are still to be found, in their order on the board."""
        return tuple(card for card in self.cards if card in self.board.own)

    @property
    def over(self) -> bool:
        """Whether all is found, the assassin was met, or no turn is left."""
        met = self.board.assassin in self.revealed
        return met or not self.own or len(self.turns) >= self.board.turns

    def hint(self, text: str) -> Game:
        """What the spymaster said: a clue that waits for a guess, or a turn that is lost.

        A clue is one word that is on no card of the board, and a count from 1 to 9: "fruit 2".
        """
        said = _CLUE.fullmatch(text.strip())
        if said is None or said[1].casefold() in self.board.cards:
            return replace(self, turns=(*self.turns, Turn(self.cards, None)))
        return replace(self, clue=Clue(said[1].casefold(), int(said[2])))

    def guess(self, text: str) -> Game:
        """What the guesser named: cards are turned over in this order, until the turn ends.

        Raises:
            ValueError: If no clue waits for a guess.
        """
        if self.clue is None:
            raise ValueError("no clue was given: call `hint` before `guess`")
        words = re.findall(r"[a-z]+", text.casefold().removeprefix("guess:"))
        named = tuple(dict.fromkeys(words))[: self.clue.count]
        revealed: list[str] = []
        for card in named:
            if card not in self.cards:
                break
            revealed.append(card)
            if card not in self.board.own:
                break
        turn = Turn(self.cards, self.clue, named, tuple(revealed))
        return replace(self, turns=(*self.turns, turn), clue=None)


def reward(game: Game) -> float:
    """The share of the team's cards that were found, from 0 to 1; 0 if the assassin was met."""
    if game.board.assassin in game.revealed:
        return 0.0
    return len(game.revealed & set(game.board.own)) / len(game.board.own)


def clue_is_good(board: Board, turn: Turn) -> bool | None:
    """Whether a clue names a kind of which the team has cards and the assassin is not.

    Returns:
        None for a clue that names no kind of `words.KINDS`, which a larger model may give: the
        rules allow any word, and nobody can say what it covers.
    """
    if turn.clue is None:
        return False
    if turn.clue.word not in KINDS:
        return None
    covered = set(KINDS[turn.clue.word]).intersection(turn.cards)
    return bool(covered & set(board.own)) and board.assassin not in covered


def count_is_right(board: Board, turn: Turn) -> bool | None:
    """Whether a clue says how many of the team's cards are of its kind; None if it is not good."""
    if turn.clue is None or not clue_is_good(board, turn):
        return None
    covered = set(KINDS[turn.clue.word]).intersection(turn.cards)
    return turn.clue.count == len(covered & set(board.own))


def follows_clue(turn: Turn) -> float | None:
    """The share of the cards that were named that are of the clue's kind.

    Returns:
        0 if none was named; None if the clue names no kind of which there are cards.
    """
    covered = set(KINDS.get(turn.clue.word, ())) if turn.clue else set[str]()
    if not covered.intersection(turn.cards):
        return None
    fitting = [name for name in turn.named if name in turn.cards and name in covered]
    return len(fitting) / max(len(turn.named), 1)


def role_figures(game: Game) -> dict[str, float]:
    """What each role did in a game, as means over its turns.

    Returns:
        ``legal_clues``, ``good_clues`` and ``right_counts`` of the spymaster,
        ``guesses_follow_clue`` of the guesser, and whether the assassin was met. A mean over no
        turns is left out.
    """
    board = game.board
    verdicts: dict[str, list[float | bool | None]] = {
        "legal_clues": [turn.clue is not None for turn in game.turns],
        "good_clues": [clue_is_good(board, turn) for turn in game.turns],
        "right_counts": [count_is_right(board, turn) for turn in game.turns],
        "guesses_follow_clue": [follows_clue(turn) for turn in game.turns],
        "assassin_met": [board.assassin in game.revealed],
    }
    known = {name: [v for v in found if v is not None] for name, found in verdicts.items()}
    return {name: statistics.fmean(found) for name, found in known.items() if found}


def _pairs(words: Iterable[str]) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in combinations(words, 2)}


def held_out_pairs() -> frozenset[frozenset[str]]:
    """Pairs of words of a kind that are together the team's own on held-out boards alone."""
    pairs = [sorted(pair) for words in KINDS.values() for pair in _pairs(words)]
    pairs.sort()
    random.Random("pairs").shuffle(pairs)
    return frozenset(frozenset(pair) for pair in pairs[: round(len(pairs) * HELD_OUT_SHARE)])


_HELD_OUT = held_out_pairs()


def _own_words(rng: random.Random, level: Level, split: Split) -> list[str]:
    while True:
        kinds = rng.sample(list(KINDS)[: level.vocabulary], level.kinds)
        sizes = Counter(kinds)  # one of each, and the rest by lot
        while sizes.total() < level.own:
            kind = rng.choice(kinds)
            # A kind keeps a word for each trap, so that traps can be drawn.
            if sizes[kind] < len(KINDS[kind]) - 2:
                sizes[kind] += 1
        own = [word for kind in kinds for word in rng.sample(KINDS[kind], sizes[kind])]
        if bool(_pairs(own) & _HELD_OUT) == (split == "test"):
            return own


def make_board(rng: random.Random, id: str, level: Level, split: Split) -> Board:
    """Draw one board.

    Args:
        rng: source of every choice.
        id: of the board.
        level: how large and how hard it is.
        split: whether two of the team's words are a held-out pair.
    """
    own = _own_words(rng, level, split)
    kinds = {KIND_OF[word] for word in own}
    alike = [word for word, kind in KIND_OF.items() if kind in kinds and word not in own]
    free = [kind for kind in list(KINDS)[: level.vocabulary] if kind not in kinds]
    strange = [word for kind in rng.sample(free, level.other_kinds) for word in KINDS[kind]]
    rest = rng.sample(alike, level.traps)
    rest += rng.sample(strange, level.others + 1 - level.traps)
    assassin = rng.choice(rest)
    cards = rng.sample([*own, *rest], len(own) + len(rest))
    return Board(
        id, tuple(cards), tuple(card for card in cards if card in own), assassin, level.turns, split
    )


def boards(split: Split, n: int, seed: int, level: int = 1) -> list[Board]:
    """Draw `n` boards; the same arguments give the same boards.

    Raises:
        ValueError: If there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"got level {level}, expected one of {', '.join(map(str, LEVELS))}")
    return [
        make_board(
            random.Random(f"{split}-{level}-{seed}-{k}"), f"{split}-{k}", LEVELS[level], split
        )
        for k in range(n)
    ]

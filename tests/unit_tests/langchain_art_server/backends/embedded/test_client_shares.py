import random

from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.embedded.client_shares import ClientShares
from langchain_art_server.backends.embedded.token_sampler import SamplingState, SequenceState

NOBODY: set[str] = set()


class Engine:
    """Each turn takes 1 ms and 0.1 ms for each of its rows."""

    def __init__(self, *, linear: bool = True) -> None:
        self.now = 0.0
        self.shares = ClientShares(lambda: self.now, linear=linear)
        self.spent = {"all": 0.0, "light": 0.0, "heavy": 0.0}

    def turn(self, **rows: int) -> str:
        found = [row(client) for client, count in rows.items() for _ in range(count)]
        turn = self.shares.begin(found, NOBODY)
        light = self.shares.light
        mine = [one for one in found if turn == "all" or (one.client in light) == (turn == "light")]
        self.shares.computed = True
        took = 0.001 + 0.0001 * len(mine)
        self.now += took
        self.spent[turn] += took
        return turn


def row(client: str) -> SequenceState:
    sampling = SamplingState(Sampling(), random.Random(0))
    return SequenceState([1, 2, 3], 9, sampling, client, filled=3)


def test_between_two_calls_of_a_light_client_the_others_turns_stay_short() -> None:
    engine = Engine()
    for _ in range(20):
        engine.turn(a=100, b=1)
    assert engine.turn(a=100) == "heavy"
    for _ in range(100):
        engine.turn(a=100)
    assert engine.turn(a=100) == "all", "it has gone"


def test_the_servers_own_calls_are_no_client() -> None:
    """The check of a new version comes just before a fit's next rollouts."""
    engine = Engine()
    own = row("")
    for rows in ([own], [row("a") for _ in range(100)], [*(row("a") for _ in range(100)), own]):
        assert engine.shares.begin(rows, NOBODY) == "all"
        assert not engine.shares.shared
    assert {engine.turn(a=100) for _ in range(50)} == {"all"}

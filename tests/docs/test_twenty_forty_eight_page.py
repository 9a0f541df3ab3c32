"""What docs/examples/twenty-forty-eight.md says of credit is what credit assignment computes."""

import random
import statistics
from collections import defaultdict

from examples.twenty_forty_eight import environment as e
from examples.twenty_forty_eight.build_base_model import MAX_MOVES, TARGET, choose
from examples.twenty_forty_eight.train import DISCOUNT
from langchain_art import TrainConfig, TurnCredit
from langchain_art.credit.candidates import CandidateCall, CandidateRun
from langchain_art.credit.credit_assignment import group_credit
from tests.support.live_server import REPO
from tests.support.soak import in_soak


def played(name: str, player: random.Random) -> tuple[list[str], e.Game]:
    """A game of the player without a plan, and of what kind each move was."""
    game, kinds = e.Game(name, target=TARGET, max_moves=MAX_MOVES), list[str]()
    while not game.is_over:
        points = {move: e.slide(game.board, move)[1] for move in e.legal_moves(game.board)}
        move, ends = choose(player, game.board), (max(points.values()), min(points.values()))
        kind = "nothing" if move not in points else "other"
        if move in points and ends[0] > ends[1]:
            kind = {ends[0]: "most", ends[1]: "fewest"}.get(points[move], kind)
        kinds.append(kind)
        game.play(move)
    return kinds, game


def group(name: str) -> list[tuple[list[str], e.Game]]:
    """8 games with the same first tiles."""
    return [played(name, random.Random(f"{name}-{run}")) for run in range(8)]


def candidate(game: e.Game, by_move: bool) -> CandidateRun:
    """The game as a run, with its own reward or those of its moves."""
    rewards = e.move_rewards(game) if by_move else [None] * game.made
    calls = tuple(CandidateCall(tokens=2, reward=reward) for reward in rewards)
    return CandidateRun(calls, None if by_move else e.reward(game))


# `test_what_players_without_a_model_get` shows the kind of it: a page's table is computed again.
@in_soak
def test_rewards_of_moves_tell_good_moves_from_bad_ones() -> None:
    """8 steps of 8 groups of 8 games; the reward of a whole game hardly tells them apart."""
    by_game = TrainConfig(advantage="standardized")
    by_move = TrainConfig(advantage="standardized", credit=TurnCredit(discount=DISCOUNT))
    kinds = ("most", "fewest", "nothing")
    shown: dict[str, list[str]] = {kind: [] for kind in kinds}
    steps = [[group(f"{step}-{number}") for number in range(8)] for step in range(8)]
    apart: list[float] = []
    for config in (by_game, by_move):
        means: list[dict[str, float]] = []
        for step in steps:
            found: defaultdict[str, list[float]] = defaultdict(list)
            for games in step:
                runs = [candidate(game, config is by_move) for _, game in games]
                for (run, call), advantage in group_credit(runs, config).advantages.items():
                    found[games[run][0][call]].append(advantage)
            means.append({kind: statistics.fmean(found[kind]) for kind in kinds})
        for kind in kinds:
            values = [mean[kind] for mean in means]
            shown[kind].append(f"{statistics.fmean(values):+.2f} ± {statistics.stdev(values):.2f}")
        between = [mean["most"] - mean["fewest"] for mean in means]
        apart.append(statistics.fmean(between) / statistics.stdev(between))
    assert 5 * apart[0] < apart[1]
    page = (REPO / "docs/examples/twenty-forty-eight.md").read_text()
    for kind, cells in shown.items():
        assert " | ".join(cells) in page, (kind, cells)

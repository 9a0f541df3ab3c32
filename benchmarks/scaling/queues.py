"""A discrete-event simulation of a fit: runs, replicas' slots, tools, the learner, publishing.

Times are in seconds; a version is the number of steps that were published. All that is drawn comes
from one seed. `tests/unit_tests/benchmarks/test_scaling.py` compares the queues with Erlang's
formulas.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean


class Clock:
    """Events in the order of their times; those of one time in the order they were made in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), then))

    def run(self, until: Callable[[], bool]) -> None:
        """One event after the other, until `until` or there are none."""
        while self._events and not until():
            self.now, _, then = heapq.heappop(self._events)
            then()


@dataclass
class _Customer:
    came: float
    seconds: float
    begin: Callable[[], None]
    then: Callable[[], None]


class Pool:
    """`servers` that are alike, with one queue: first come, first served."""

    def __init__(self, clock: Clock, servers: int) -> None:
        self._clock, self.servers = clock, servers
        self._queue: deque[_Customer] = deque()
        self._busy = 0
        self._looked = 0.0
        #: Integrals over time: of customers that wait or are served, and of servers that work.
        self.present_seconds = self.busy_seconds = 0.0
        #: Customers whose service began, and how long they waited for it in all.
        self.served, self.waited = 0, 0.0

    def ask(self, seconds: float, begin: Callable[[], None], then: Callable[[], None]) -> None:
        """Be served for `seconds`: `begin` is called when it is one's turn, `then` at the end."""
        self._look()
        self._queue.append(_Customer(self._clock.now, seconds, begin, then))
        self._next()

    def _next(self) -> None:
        while self._queue and self._busy < self.servers:
            one = self._queue.popleft()
            self._busy += 1
            self.served += 1
            self.waited += self._clock.now - one.came
            one.begin()
            self._clock.after(one.seconds, lambda one=one: self._end(one))

    def _end(self, one: _Customer) -> None:
        self._look()
        self._busy -= 1
        self._next()
        one.then()

    def _look(self) -> None:
        past = self._clock.now - self._looked
        self.present_seconds += past * (self._busy + len(self._queue))
        self.busy_seconds += past * self._busy
        self._looked = self._clock.now


@dataclass(frozen=True)
class Fit:
    """What is simulated. Durations with `mean` are drawn from exponential distributions."""

    runs_at_once: int
    """Rollouts that the workers run at the same time, if they may."""
    slots: int
    """Calls that all replicas serve at the same time."""
    calls: int = 12
    mean_call: float = 3.0
    """Seconds that a call takes in its slot."""
    mean_tool: float = 1.0
    """Seconds between the calls of a run."""
    group: int = 8
    groups_a_step: int = 64
    steps_ahead: int = 2
    """`Trainer(max_steps_ahead=…)`: groups of step k begin when version k - this is out."""
    learn: float = 60.0
    """Seconds of a step of the learner."""
    publish: float = 5.0
    """Seconds from the end of a step until calls are answered by the new version."""


@dataclass
class Seen:
    """What came of a simulated fit, its first steps left out."""

    seconds: float = 0.0
    runs: int = 0
    staleness: list[float] = field(default_factory=list[float])
    """Of each step: versions that its calls were old when it began, on average."""
    oldest: int = 0
    """Versions that the oldest call of a step was old."""
    slots_busy: float = 0.0
    learner_busy: float = 0.0
    call_waited: float = 0.0
    """Seconds that a call waited for a slot, on average."""

    @property
    def runs_a_day(self) -> float:
        return self.runs / self.seconds * 86_400

    @property
    def mean_staleness(self) -> float:
        return fmean(self.staleness)


class _Simulation:
    def __init__(self, fit: Fit, seed: int) -> None:
        self.fit, self._draw = fit, random.Random(seed)
        self.clock = Clock()
        self.slots = Pool(self.clock, fit.slots)
        self.version = 0
        self._begun = self._running = 0
        self._left: dict[int, int] = {}
        self._versions: dict[int, list[int]] = {}
        self._ended: deque[int] = deque()
        self._learning = False
        self.learned_seconds = 0.0
        self.steps: list[list[int]] = []

    def begin_runs(self) -> None:
        """As many as workers have room for and staleness allows, group after group."""
        fit = self.fit
        allowed = (self.version + 1 + fit.steps_ahead) * fit.groups_a_step * fit.group
        while self._running < fit.runs_at_once and self._begun < allowed:
            group = self._begun // fit.group
            self._left.setdefault(group, fit.group)
            self._begun += 1
            self._running += 1
            self._call(group, fit.calls)

    def _call(self, group: int, left: int) -> None:
        if left == 0:
            self._end_run(group)
            return

        def begin() -> None:  # a call keeps the version that it began with
            self._versions.setdefault(group, []).append(self.version)

        def then() -> None:
            tool = self._draw.expovariate(1 / self.fit.mean_tool) if self.fit.mean_tool else 0.0
            self.clock.after(tool, lambda: self._call(group, left - 1))

        self.slots.ask(self._draw.expovariate(1 / self.fit.mean_call), begin, then)

    def _end_run(self, group: int) -> None:
        self._running -= 1
        self._left[group] -= 1
        if self._left[group] == 0:
            del self._left[group]
            self._ended.append(group)
            self._learn()
        self.begin_runs()

    def _learn(self) -> None:
        """A step on the groups that ended first, if there are enough and none is learned from."""
        if self._learning or len(self._ended) < self.fit.groups_a_step:
            return
        self._learning = True
        taken = [self._ended.popleft() for _ in range(self.fit.groups_a_step)]
        ages = [self.version - one for group in taken for one in self._versions.pop(group)]
        self.steps.append(ages)
        self.clock.after(self.fit.learn + self.fit.publish, self._publish)

    def _publish(self) -> None:
        self.learned_seconds += self.fit.learn
        self.version += 1
        self._learning = False
        self._learn()
        self.begin_runs()


def simulate(fit: Fit, seed: int, steps: int = 40, warm_up: int = 10) -> Seen:
    """A fit of `steps` steps after `warm_up` others that are not counted."""
    one = _Simulation(fit, seed)
    one.begin_runs()
    one.clock.run(lambda: len(one.steps) > warm_up)
    begun, learned = one.clock.now, one.learned_seconds
    busy, waited, served = one.slots.busy_seconds, one.slots.waited, one.slots.served
    one.clock.run(lambda: len(one.steps) > warm_up + steps)
    seconds = one.clock.now - begun
    counted = one.steps[warm_up + 1 :]
    return Seen(
        seconds=seconds,
        runs=steps * fit.groups_a_step * fit.group,
        staleness=[fmean(ages) for ages in counted],
        oldest=max(max(ages) for ages in counted),
        slots_busy=(one.slots.busy_seconds - busy) / seconds / fit.slots,
        learner_busy=(one.learned_seconds - learned) / seconds,
        call_waited=(one.slots.waited - waited) / (one.slots.served - served),
    )

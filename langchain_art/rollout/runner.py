"""Makes runs: a rollout on a scenario becomes a trajectory.

A rollout that raises becomes a failed trajectory, which is counted and never scored zero; it has a
reward only if the rollout set one on its run before. A rollout that raised because the server was
unavailable is repeated when the server is back.
"""

from __future__ import annotations

import asyncio
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias, cast
from urllib.parse import urlsplit

from langchain_art import errors
from langchain_art._callables import call, let_all_nodes_run
from langchain_art.call_seeds import run_seed
from langchain_art.rollout.graph_rollout import Graph, as_function, is_graph
from langchain_art.rollout.scenarios import shown
from langchain_art.wire import Trajectory
from langchain_art.wire.base_urls import DEFAULT_BASE_URL
from langchain_art.wire.identifiers import escaped
from langchain_art.wire.trajectories import storable

if TYPE_CHECKING:
    from langchain_art.tracing.run import Run
    from langchain_art.tracing.scope import OpenedRuns


class RunSource(ABC):
    """Makes runs of scenarios, of which the fraction `max_failed` may fail."""

    concurrency: int

    def __init__(self, max_failed: float) -> None:
        self._max_failed = max_failed
        self._failed = 0
        self._allowed_failures = 0.0
        self.retried = 0
        """Runs repeated because the server, or their worker, was unavailable."""
        self.first_error: str | None = None
        """Error of the first failed run since the latest `expect`."""

    @abstractmethod
    async def run(self, scenario: Any, name: str) -> Trajectory:
        """One run of one scenario. Raises RolloutFailed."""

    @abstractmethod
    async def close(self) -> None:
        """Stop what still runs."""

    def expect(self, runs: int) -> None:
        """Count failures anew, as a fraction of this many runs."""
        self._failed, self.first_error = 0, None
        self._allowed_failures = self._max_failed * runs

    def count_failure(self, words: str, which: str, cause: BaseException | None = None) -> None:
        """Count a failed run of scenario `which`. Raises RolloutFailed if there are too many."""
        self._failed += 1
        self.first_error = self.first_error or f"{words} (scenario {which})"
        if self._failed > self._allowed_failures:
            hint = "Run the rollout on this one scenario to see the traceback."
            if re.search("Event loop is closed|different (event )?loop", self.first_error):
                hint = (
                    "Its client, such as ChatOpenAI, keeps connections of an earlier loop: "
                    "await all in one `asyncio.run(main())`."
                )
            raise errors.RolloutFailed(
                f"{self._failed} rollouts raised, at most {self._allowed_failures:g} may "
                f"(max_failed). The first: {self.first_error}. {hint}"
            ) from cause


RolloutOutcome: TypeAlias = "Run | Trajectory | float"
Rollout: TypeAlias = "Callable[[Any], RolloutOutcome | Awaitable[RolloutOutcome]] | Graph"
"""A function (``async def`` or ``def``) of a scenario that returns the `Run` of its own
``capture()``, a `Trajectory`, or a reward (then `capture()` is opened around it). Or a graph, which
runs on `graph_rollout.graph_input` of the scenario and returns no reward. Model calls of a
`RemoteGraph` are not recorded here but on the server, tagged with the run's id."""


class StopsAll(errors.ConfigError):
    """An error of the program in a run, which more runs would only hide: it is raised on."""


class RolloutWorker(RunSource):
    """Makes single runs, and owns their threads.

    Args:
        rollout: as of `gather`, like those that are not named here.
        retries: how often one run is repeated because the server was unavailable.
        ready: awaited before a repeated run, after a pause that grows from 0.5 s to 10 s.
        on_run: called with what was recorded of each run, beside its trajectory: for an export.
        server: its address, by which calls of other clients than ours are known
            (`is_server_away`). None: ART_BASE_URL, or the default.
        say: called with the message of an outage for which runs are repeated.
    """

    def __init__(
        self,
        rollout: Rollout,
        concurrency: int = 64,
        *,
        on_done: Callable[[Trajectory], None] | None = None,
        retries: int = 5,
        ready: Callable[[], Awaitable[object]] | None = None,
        max_failed: float = 0.5,
        on_run: Callable[[Run], None] | None = None,
        server: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(max_failed)
        self.concurrency = concurrency
        self.on_done, self.on_run = on_done, on_run
        self.retries, self.ready = retries, ready
        self._server = server or os.environ.get("ART_BASE_URL") or DEFAULT_BASE_URL
        self._say = say
        self._repeating = 0
        self._is_graph = is_graph(rollout)
        self._function = _function(rollout)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="rollout")

    async def close(self) -> None:
        """End the threads; does not wait for them: one that hangs must not delay Ctrl-C."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, scenario: Any, name: str) -> Trajectory:
        """One run of one scenario, repeated while the server is unavailable."""
        let_all_nodes_run()
        attempt, seed = 0, run_seed.get()
        while True:
            if seed is not None:  # a repeated run samples what the first would have
                run_seed.set(seed.copy())
            within, made, error = await self._once(scenario, name)
            if error is None or attempt == self.retries or not is_server_away(error, self._server):
                break
            self.retried += 1
            if self._repeating == 0 and self._say is not None:
                self._say(
                    "The server did not serve a call, so runs that failed by it are repeated; the "
                    f"first: {words_of(error)} (scenario {shown(scenario, name)})"
                )
            self._repeating += 1
            try:
                await asyncio.sleep(min(0.5 * 2**attempt, 10.0))
                attempt += 1
                if self.ready is not None:
                    await self.ready()
            finally:
                self._repeating -= 1
        trajectory = storable(made)
        if error is not None:
            self.count_failure(words_of(error), shown(scenario, name), error)
        elif trajectory is not made:
            self.count_failure(str(trajectory.error), shown(scenario, name))
        for recorded in within.runs:
            if self.on_run is not None and recorded.id == trajectory.id:
                self.on_run(recorded)
        if self.on_done is not None:
            self.on_done(trajectory)
        return trajectory

    async def _outcome(self, scenario: Any, name: str, run: Run) -> RolloutOutcome:
        if self._is_graph:
            output = await self._call(scenario, name, run.id)
            run.output = output if run.output is None else run.output
            return run
        outcome = await self._call(scenario)
        if isinstance(outcome, SupportsFloat):  # Decimal and NumPy's bool, too
            run.reward = float(outcome)
            return run
        return outcome

    async def _once(
        self, scenario: Any, name: str
    ) -> tuple[OpenedRuns, Trajectory, Exception | None]:
        # langchain-core and its langsmith, on first use
        from langsmith import tracing_context  # noqa: PLC0415

        from langchain_art.tracing.scope import OpenedRuns, capture, opened  # noqa: PLC0415

        opened.set(within := OpenedRuns(exported=self.on_run is not None))
        # Thousands of rollouts would go to a paid account, because a program's environment says
        # LANGSMITH_TRACING. One that is to be traced opens a tracing_context of its own.
        with tracing_context(enabled=False):
            async with capture(scenario=name) as run:
                try:
                    outcome = await self._outcome(scenario, name, run)
                    return within, _trajectory(outcome, scenario, name), None
                except StopsAll as error:
                    raise errors.ConfigError(str(error)) from None
                except Exception as error:  # noqa: BLE001 - user code may raise anything
                    failed = run if self._is_graph else within.unfinished()
                    trajectory = Trajectory(
                        id=failed.id,
                        scenario=failed.scenario if failed.scenario is not None else name,
                        turns=tuple(failed.turns)[:4096],
                        reward=failed.reward,
                        status="failed",
                        error=words_of(error),
                    )
                    return within, trajectory, error

    async def _call(self, *given: Any) -> Any:
        return await call(self._function, *given, threads=self._threads)


def _function(rollout: Rollout) -> Callable[..., Any]:
    if is_graph(rollout):
        return as_function(rollout)
    if callable(rollout):
        return rollout
    compiled = " Compile it first: graph.compile()." if hasattr(rollout, "compile") else ""
    raise errors.ConfigError(
        f"got the rollout {rollout!r:.200}, expected a function of one scenario, or a graph with "
        f"ainvoke or invoke.{compiled}"
    )


def words_of(error: BaseException) -> str:
    """An error's class and message, as a text that can be stored."""
    try:
        words = str(error)
    except Exception as why:  # noqa: BLE001 - user code
        words = f"its message raised {type(why).__name__}"
    return escaped(f"{type(error).__name__}: {words}"[:2000]).replace("\0", "")


def _trajectory(outcome: object, scenario: Any, name: str) -> Trajectory:
    if isinstance(outcome, Trajectory):
        found = outcome
    elif callable(method := getattr(outcome, "trajectory", None)):
        found = cast(Trajectory, method())
    else:
        raise StopsAll(
            f"The rollout returned {outcome!r:.200} for the scenario {shown(scenario, name)}, "
            "expected the run that capture() gives, a Trajectory, or a number as its reward. End "
            "each way through it with `return run`, or with the number; a run without a score is "
            "that of your own capture(), its reward left unset."
        )
    return found if found.scenario is not None else found.model_copy(update={"scenario": name})


def is_server_away(error: BaseException, server: str) -> bool:
    """True if `error`, or what it was raised from, is a call that our server could not serve.

    Ours are calls of `ChatART`, of our clients, and of any client to the address `server`. What was
    raised while such an error was handled, and not ``from`` it, is the program's own.
    """
    found = [error]
    for one in found:  # grows by their causes while it is read
        causes = [one.__cause__]
        if isinstance(one, BaseExceptionGroup):
            causes += cast("BaseExceptionGroup[BaseException]", one).exceptions
        found += [cause for cause in causes if cause is not None and cause not in found]
    return any(_is_away(one, server) for one in found)


def _is_away(error: BaseException, server: str) -> bool:
    if isinstance(error, errors.ServerUnreachable | errors.EngineUnavailable | errors.Overloaded):
        return True
    # By name, so that OpenAI's SDK (and its import time) is not needed here, nor its HTTP library.
    kinds = {k.__name__ for k in type(error).__mro__ if k.__module__.split(".")[0] in _CLIENTS}
    status = getattr(error, "status_code", None)
    if "APIError" in kinds and status is None:  # within a stream, whose status was 200
        unserved = getattr(error, "type", None) == "server_error"
    else:
        unserved = (
            "APIStatusError" in kinds
            and isinstance(status, int)
            and (status == 429 or status >= 500)
        )
    if not unserved and kinds.isdisjoint(("APIConnectionError", "TransportError")):
        return False
    return getattr(error, errors.OF_OUR_CALL, False) or _origin(_url(error)) == _origin(server)


#: Libraries with whose errors a call of another client than ours to our server ends.
_CLIENTS = ("openai", "httpx", "httpx2")


def _url(error: BaseException) -> str:
    try:
        return str(cast(Any, error).request.url)
    except (AttributeError, RuntimeError):  # httpx: "The .request property has not been set."
        return ""


def _origin(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return ("localhost" if parts.hostname in ("127.0.0.1", "::1") else parts.hostname), port

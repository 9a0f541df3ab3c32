"""The whole suite against a server that serves the conformance model: `run_suite`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from openai import OpenAIError

from langchain_art.chat_models.chat_art import ChatART
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ArtError, ConfigError
from langchain_art.tracing.scope import capture
from tests.conformance.suite import checks
from tests.conformance.suite.cases import load_cases
from tests.conformance.suite.harness import MODES, TOPOLOGIES, Mode, Served, Topology
from tests.conformance.suite.outcomes import CannotBeChecked, NotHeld
from tests.conformance.suite.performance import perform
from tests.conformance.suite.proxy import ProxyWitness
from tests.conformance.suite.scripts import script

#: The promises, in the order in which they are checked.
PROMISES = ("captured", "exact tokens", "each token once", "judged", "trained")
_OF_RUNS = PROMISES[2:]
POLICY, RIVAL = "conformance", "conformance-rival"
_READY = "ready ⟦to say¦this⟧"

State = Literal["held", "not held", "cannot be checked"]
STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class PromiseCheck:
    """What became of one promise, for one topology in one mode."""

    topology: str
    mode: Mode
    promise: str
    state: State
    reason: str = ""
    """Why it is not held, or what is missing."""


@dataclass(frozen=True)
class Suite:
    """What is run, and on which server.

    Args:
        server: its address, with ``/v1``.
        policy: whose calls are trained. None: `POLICY`, which is made.
        gap: most nats between learner and sampler; take 0.05 for a server in half precision.

    The key, if the server has one, is that of ``ART_API_KEY``.
    """

    server: str
    policy: str | None = None
    gap: float = 1e-4

    def run(
        self,
        cases: Sequence[tuple[Topology, Mode]],
        on_done: Callable[[Topology, Mode], None] | None = None,
    ) -> list[PromiseCheck]:
        """Run topologies, and check every promise of each.

        Raises:
            ConfigError: the server does not serve the conformance model, or makes no policy and
                none was named.
            ServerUnreachable: it does not answer.
        """
        found: list[PromiseCheck] = []
        lacks: dict[str, str] = {}
        last = {case.name: mode for case, mode in cases}
        with ArtClient(self.server) as client, ProxyWitness(client.base_url) as proxy:
            served = self._served(client, proxy, lacks)
            self._preflight(client, served, proxy, lacks)
            for case, mode in cases:
                steps = self._steps(case, mode, served, proxy, client, lacks)
                if mode != last[case.name]:
                    del steps["trained"]  # once is enough
                found += [
                    _finding(case, mode, promise, lacks.get(promise), check)
                    for promise, check in steps.items()
                ]
                if on_done is not None:
                    on_done(case, mode)
        return found

    def _served(self, client: ArtClient, proxy: ProxyWitness, lacks: dict[str, str]) -> Served:
        policy, rival, base_model = self.policy, None, None
        try:
            client.create_policy(policy or POLICY)
            rival = client.create_policy(RIVAL).name
            policy = policy or POLICY
            base_model = client.status().base_model
        except ArtError as error:
            lacks["trained"] = f"no policies are made there (POST /v1/policies): {error}"
            if policy is None:
                raise ConfigError(
                    f"{self.server} makes no policy ({error}). Name the model to ask: --policy"
                ) from error
        return Served(proxy.base_url, policy, rival, base_model)

    def _preflight(
        self, client: ArtClient, served: Served, proxy: ProxyWitness, lacks: dict[str, str]
    ) -> None:
        """Ask once, and note for which promises the server has not what they need."""
        # Another model may talk for as long as it is let.
        model = ChatART(model=served.policy, base_url=served.base_url, max_tokens=64)
        try:
            with capture() as run:
                reply = model.invoke(script(_READY))
        except OpenAIError as error:
            raise ConfigError(
                f"{self.server} does not answer a chat completion: {error}"
            ) from error
        if reply.text != _READY:
            raise ConfigError(
                f"{served.policy!r} of {self.server} said {reply.text[:200]!r}, expected "
                f"{_READY!r}: it does not serve the conformance model. Write the model with "
                "`python -m tests.conformance.suite --write-model FOLDER`, and serve that folder."
            )
        [call] = proxy.calls()
        sent = run.trajectory()
        for route, ask, promises in (
            ("GET /v1/calls/ID", lambda: client.call(call.id), PROMISES),
            ("POST /v1/trajectories", lambda: client.post_trajectory(sent), _OF_RUNS),
            ("GET /v1/trajectories/ID/audit", lambda: client.audit(sent.id), _OF_RUNS),
            ("GET /v1/jobs", lambda: client.jobs(served.policy), _OF_RUNS[1:]),
        ):
            try:
                ask()
            except ArtError as error:
                for promise in promises:
                    if promise not in ("captured", "judged"):
                        lacks.setdefault(promise, f"{route}: {error}")

    def _steps(
        self,
        case: Topology,
        mode: Mode,
        served: Served,
        proxy: ProxyWitness,
        client: ArtClient,
        lacks: Mapping[str, str],
    ) -> dict[str, Callable[[], object]]:
        """Run a topology in one mode: promise -> its check, or what raises why there is none."""
        try:
            if case.heard == "server" and "exact tokens" in lacks:
                raise CannotBeChecked(lacks["exact tokens"])
            run = perform(case, mode, served, proxy, client, number=1)
        except CannotBeChecked as missing:
            return dict.fromkeys(PROMISES, _raises(missing))
        except Exception as error:  # noqa: BLE001 - whatever a program raises is the finding
            rest = CannotBeChecked("the program did not end as it should")
            broken = NotHeld(f"the program raised {error!r:.1500}")
            return dict.fromkeys(PROMISES, _raises(rest)) | {"captured": _raises(broken)}

        def exact() -> None:
            checks.exact_tokens(run)
            checks.really_sampled(run)

        def train() -> None:
            other = perform(case, mode, served, proxy, client)
            checks.trained(other, run, served.policy, self.gap)

        return {
            "captured": lambda: checks.captured(run),
            "exact tokens": exact,
            "each token once": lambda: checks.audited(run, served.policy),
            "judged": lambda: checks.judged(run),
            "trained": train,
        }


def _raises(error: ArtError) -> Callable[[], object]:
    def check() -> None:
        raise error

    return check


def _finding(
    case: Topology,
    mode: Mode,
    promise: str,
    lacks: str | None,
    check: Callable[[], object],
) -> PromiseCheck:
    """What a check says, unless something `lacks` for it."""
    state: State = "held"
    reason = ""
    try:
        if lacks is not None:
            raise CannotBeChecked(lacks)
        check()
    except CannotBeChecked as missing:
        state, reason = "cannot be checked", str(missing)
    except NotHeld as broken:
        state, reason = "not held", str(broken)
    except (ArtError, LookupError) as error:
        state, reason = "not held", f"{type(error).__name__}: {error}"
    return PromiseCheck(case.name, mode, promise, state, reason)


def chosen(only: str = "", modes: Sequence[Mode] = MODES) -> list[tuple[Topology, Mode]]:
    """The topologies whose names have all words of `only`, each in its modes of these.

    Raises:
        ConfigError: there is none.
    """
    load_cases()
    words = only.casefold().split()
    found: list[tuple[Topology, Mode]] = [
        (case, mode)
        for case in TOPOLOGIES.values()
        if all(word in case.name.casefold() for word in words)
        for mode in case.modes
        if mode in modes
    ]
    if not found:
        raise ConfigError(f"got {only!r}, expected words of the names of topologies")
    return found

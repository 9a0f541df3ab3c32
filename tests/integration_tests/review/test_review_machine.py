"""Push, review, revise, delete, pull, train, crash, pull again, in any order: trained once each.

The store, the plan, the pull and what a job makes of its request are the real ones. Langfuse is its
stand-in, without a socket; the learner is left out: a job's rows are made, and not learned from.
"""

import asyncio
import functools
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import httpx
import pytest
import typing_extensions
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from langfuse.api import LangfuseAPI

from langchain_art import wire
from langchain_art.errors import Conflict, ServerUnreachable
from langchain_art.export.ids import CALL, TRAJECTORY, call_observation_id, root_id, trace_id
from langchain_art.review.pull import pull
from langchain_art.wire.trajectories import EVALUATION
from langchain_art_server.gateway.review_routes import order, planned
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.jobs.eligibility import steps_since
from langchain_art_server.jobs.review_plan import require_untrained
from langchain_art_server.storage.store import Store
from tests.support.call_records import record
from tests.support.langfuse_server import LangfuseServer
from tests.support.langfuse_server.server import Asked
from tests.support.langfuse_server.spans import Span
from tests.support.soak import count

SEQUENCES, STEPS = count(8, 10_000), 40
#: Sequences that share a database: in one of all of them, each would take longer than the last.
SEQUENCES_OF_ONE = 50
T = TypeVar("T")
#: A verdict's run, and the kind of it: the whole run, its call, or the correction of its call.
Subject = tuple[str, str]
KINDS = ("run", "call", "correction")
VALUES = st.sampled_from([0.0, 0.5, 1.0])
LOOP = asyncio.new_event_loop()


def done(work: Awaitable[T]) -> T:
    return LOOP.run_until_complete(work)


class StoreClient:
    """What a pull needs of an `ArtClient`, on the store. `lost`: the next answer is."""

    def __init__(self, store: Store, policy: str) -> None:
        self._store, self._policy, self.lost = store, policy, False

    def reviews(self, *, source: str) -> list[wire.Review]:
        page = done(self._store.reviews.page(10**6, source=source, policy=self._policy))
        return [wire.Review.model_validate_json(one) for one in page.items]

    def foresee_reviews(self, runs: Sequence[str]) -> dict[str, wire.VerdictFate]:
        return dict.fromkeys(done(self._store.trajectories(runs)), "trains")

    def policies(self) -> list[wire.PolicyStatus]:
        return []

    def call(self, call: str) -> dict[str, Any]:
        """Raises NotFound: only deleted runs are looked up, and their calls went with them."""
        raise AssertionError(done(self._store.call(call)))

    def trajectory(self, run: str) -> wire.Trajectory:
        return done(self._store.trajectory(run)).trajectory

    def put_reviews(self, reviews: Sequence[wire.Review]) -> wire.ReviewsKept:
        kept = done(self._store.reviews.put(reviews))
        if self.lost:
            self.lost = False
            raise ServerUnreachable("the client was killed")
        return kept


def api_of(server: LangfuseServer) -> LangfuseAPI:
    """Langfuse's SDK, whose requests the stand-in answers in this process."""

    def send(request: httpx.Request) -> httpx.Response:
        query: defaultdict[str, list[str]] = defaultdict(list)
        for name, value in request.url.params.multi_items():
            query[name].append(value)
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Asked(request.method, request.url.path, dict(query), headers, 0)
        found = server.answered(asked, None)
        assert found is not None
        return httpx.Response(found[0], json=found[1])

    return LangfuseAPI(
        base_url="http://langfuse",
        username=server.keys[0],
        password=server.keys[1],
        httpx_client=httpx.Client(transport=httpx.MockTransport(send)),
    )


def service_of(store: Store) -> Any:
    """What the step by reviews needs of a `Service`, on the store."""

    async def get(_: str) -> None: ...

    async def rated(request: wire.TrainRequest) -> wire.TrainRequest:
        return request

    async def checked(request: wire.TrainRequest) -> list[wire.Trajectory]:
        ids = dict.fromkeys(one for group in request.groups for one in group)
        known = await store.trajectories(ids)
        return [known[one].trajectory for one in ids]

    return SimpleNamespace(
        store=store,
        policies=SimpleNamespace(get=get),
        health=SimpleNamespace(require_space=lambda: None),
        settings=SimpleNamespace(max_queued_jobs=10_000),
        jobs=SimpleNamespace(wake=lambda: None),
        rated=rated,
        checked=checked,
    )


class Twin:
    """What should be: written down beside the server, and as simply as it can be said."""

    def __init__(self) -> None:
        self.scenario: dict[str, str] = {}
        self.version: dict[str, int] = {}
        self.held_out: set[str] = set()
        self.langfuse: dict[Subject, Any] = {}
        self.server: dict[Subject, Any] = {}
        """What the last pull brought; None: it was taken back."""
        self.trained: defaultdict[Subject, list[tuple[int, Any]]] = defaultdict(list)
        """The versions that learned from a verdict, each with its value; in this order."""
        self.ordered: defaultdict[Subject, list[Any]] = defaultdict(list)
        """The values that jobs which have not ended train, in their order."""
        self.parents: dict[int, int] = {}
        self.serving = 0

    @property
    def lineage(self) -> list[int]:
        found, version = [self.serving], self.serving
        while version:
            version = self.parents[version]
            found.append(version)
        return found

    def last(self, subject: Subject) -> Any:
        """What a verdict was last trained with, or is to be by a job that has not ended."""
        lineage = self.lineage
        past = [value for version, value in self.trained[subject] if version in lineage]
        return [None, *past, *self.ordered[subject]][-1]

    def due(self, staleness: int | None) -> tuple[dict[Subject, Any], list[float]]:
        """The verdicts that the next step trains, each with its value; what they are beside."""
        lineage = self.lineage
        pools: defaultdict[tuple[str, str], dict[Subject, Any]] = defaultdict(dict)
        due: dict[Subject, Any] = {}
        beside: list[float] = []
        for subject, value in self.server.items():
            run, kind = subject
            if value is None or self.scenario[run] in self.held_out:
                continue
            if kind == "correction":
                if self.last(subject) != value:
                    due[subject] = value
            else:
                pools[self.scenario[run], kind][subject] = value
        for pool in pools.values():
            if len(set(pool.values())) < 2:
                continue
            for subject, value in pool.items():
                sampled = self.version[subject[0]]
                lag = lineage.index(sampled) if sampled in lineage else None
                fresh = lag is not None and (staleness is None or lag <= staleness)
                if fresh and self.last(subject) != value:
                    due[subject] = value
            if due.keys() & pool.keys():
                beside += [value for subject, value in pool.items() if subject not in due]
        return due, sorted(beside)


class ReviewMachine(RuleBasedStateMachine):
    folder: ClassVar[Path]
    database: ClassVar[str]
    store: ClassVar[Store]
    numbers: ClassVar[Iterator[int]] = itertools.count()
    counts: ClassVar[defaultdict[str, int]] = defaultdict(int)
    runs = Bundle("runs")

    @initialize(target=runs)
    def begin(self) -> Any:
        self.policy = f"p-{next(self.numbers)}"
        if ReviewMachine.counts["sequences"] % SEQUENCES_OF_ONE == 0:
            self.crash(new=True)
        self.twin = Twin()
        self.langfuse = LangfuseServer()
        self.api, self.client = api_of(self.langfuse), StoreClient(self.store, self.policy)
        self.scores: dict[Subject, str] = {}
        self.notes = Path(tempfile.mkdtemp(dir=self.folder))
        done(self.store.add_policy(self.policy, wire.LoraConfig()))
        done(self.store.add_checkpoint(self._checkpoint(0, None)))
        ReviewMachine.counts["sequences"] += 1
        return multiple(*(self._sample(f"{self.policy}-a") for _ in range(3)))

    # --- runs -----------------------------------------------------------------------------------

    @rule(target=runs, scenario=st.sampled_from("ab"), many=st.integers(2, 4))
    def sample(self, scenario: str, many: int) -> Any:
        return multiple(*(self._sample(f"{self.policy}-{scenario}") for _ in range(many)))

    def _sample(self, scenario: str) -> str:
        run = f"{self.policy}-r{len(self.twin.scenario)}"
        serving = self.twin.serving
        call = record(f"{run}-c", policy=self.policy, version=serving, prompt=(1, 2), said=(3, 4))
        reply = {"role": "assistant", "content": "sampled"}
        turn = wire.Turn(
            call_id=call.id,
            node="n",
            model=f"{self.policy}@{serving}",
            reply=reply,
            messages=({"role": "user", "content": run},),
        )
        done(self.store.add_calls([call]))
        done(
            self.store.add_trajectories([wire.Trajectory(id=run, scenario=scenario, turns=(turn,))])
        )
        trace = trace_id(run)
        shown = {f"langfuse.trace.metadata.{TRAJECTORY}": run}
        for name, parent, more in (
            (root_id(run), "", {}),
            (call_observation_id(run, call.id), root_id(run), {CALL: call.id}),
        ):
            told = {f"langfuse.observation.metadata.{key}": value for key, value in more.items()}
            self.langfuse.spans.append(
                Span(trace, name, parent, "x", 1, 2, shown | told, {}, "s", 0, 0.0)
            )
        self.twin.scenario[run], self.twin.version[run] = scenario, serving
        return run

    @rule(scenario=st.sampled_from("bbba"))
    def evaluate(self, scenario: str) -> None:
        """An evaluation runs a scenario; its run is deleted at once."""
        run, scenario = f"{self.policy}-e{next(self.numbers)}", f"{self.policy}-{scenario}"
        mark = {EVALUATION: f"{self.policy}@0"}
        done(
            self.store.add_trajectories([wire.Trajectory(id=run, scenario=scenario, metadata=mark)])
        )
        done(self.store.delete_trajectory(run))
        self.twin.held_out.add(scenario)

    # --- what people do in Langfuse -------------------------------------------------------------

    @rule(
        reviewed=st.lists(runs, min_size=2, max_size=6, unique=True),
        kind=st.sampled_from(["run", "run", "call", "correction"]),
        values=st.lists(VALUES, min_size=6, max_size=6),
    )
    def review(self, reviewed: list[str], kind: str, values: list[float]) -> None:
        """New verdicts, or other values of those that were given."""
        for run, value in zip(reviewed, values, strict=False):
            self._annotate((run, kind), value)

    def _annotate(self, subject: Subject, value: float) -> None:
        run, kind = subject
        about: dict[str, Any] = {"score_id": self.scores.get(subject)}
        if kind != "run":
            about["observation_id"] = call_observation_id(run, f"{run}-c")
        said: Any = value
        if kind == "correction":
            said, about["data_type"] = f"better by {value}", "CORRECTION"
        name = "human_reward"
        self.scores[subject] = self.langfuse.annotate(trace_id(run), name, said, **about)
        self.twin.langfuse[subject] = said

    @precondition(lambda self: self.scores)
    @rule(data=st.data())
    def delete_reviews(self, data: st.DataObject) -> None:
        given = st.sampled_from(sorted(self.scores))
        for subject in data.draw(st.sets(given, min_size=1, max_size=3)):
            del self.langfuse.scores[self.scores.pop(subject)]
            del self.twin.langfuse[subject]

    # --- commands -------------------------------------------------------------------------------

    @rule(everything=st.booleans(), killed=st.sampled_from([False, False, True]))
    def pull(self, everything: bool, killed: bool) -> None:
        """A pull; of one that is killed the server has what it sent, and nothing is noted."""
        self.client.lost = killed
        try:
            pull(self.client, root=self.notes, everything=everything, api=self.api)  # type: ignore[arg-type]
        except ServerUnreachable:
            assert killed
        self.client.lost = False
        known = self.twin.server
        gone = [one for one in known if one not in self.twin.langfuse] if everything else []
        known |= dict.fromkeys(gone) | self.twin.langfuse
        ReviewMachine.counts["pulls"] += 1
        ReviewMachine.counts["taken back"] += len(gone)

    @rule(
        staleness=st.sampled_from([None, 0, 0, 1]),
        orders=st.lists(st.sampled_from(["new key", "same key"]), max_size=2),
        killed=st.sampled_from([False, False, False, True]),
        pulls=st.booleans(),
        revised=st.booleans(),
    )
    def train(
        self, staleness: int | None, orders: list[str], killed: bool, pulls: bool, revised: bool
    ) -> None:
        """`review train`: killed before it orders, or ordered again by those who got no answer.

        Where it is `revised`, all that it trains changes before the jobs run, and is ordered, too.
        """
        if pulls:
            self.pull(everything=False, killed=False)
        config = wire.TrainConfig(credit="call", max_staleness=staleness)
        asked = wire.ReviewTraining(policy=self.policy, config=config, correction_steps=1)
        due, beside = self.twin.due(staleness)
        service = service_of(self.store)
        reviews = done(self.store.reviews.of_policy(self.policy))
        plan = done(planned(service, asked, reviews))[0].plan
        kinds = {"reward": ("run", "call"), "correction": ("correction",)}
        trains = {
            (one.trajectory, kinds[one.kind][one.kind == "reward" and one.call_id is not None])
            for one in plan.verdicts
            if one.fate == "trains"
        }
        assert trains == set(due)
        others = [value for one in plan.compared for values in one.values() for value in values]
        assert sorted(others) == beside
        if killed:
            return
        key = f"{self.policy}-{next(self.numbers)}"
        jobs = done(order(service, asked, key))
        for again in orders:
            if again == "same key":
                assert [one.id for one in done(order(service, asked, key))] == [
                    one.id for one in jobs
                ] or not jobs
            else:
                assert done(order(service, asked, f"{key}-{next(self.numbers)}")) == []
        corrections = sum(kind == "correction" for _, kind in due)
        assert len(jobs) == (len(due) > corrections) + (corrections > 0)
        for subject, value in due.items():
            self.twin.ordered[subject].append(value)
        ReviewMachine.counts["verdicts ordered"] += len(due)
        if revised and due:
            for number, subject in enumerate(sorted(due)):
                self._annotate(subject, 2.0 + number % 2)
            self.train(staleness, [], killed=False, pulls=True, revised=False)

    @rule(fate=st.sampled_from(["succeeds", "succeeds", "succeeds", "fails", "is cancelled"]))
    def work(self, fate: str) -> None:
        """The next job runs, and ends; or all of one order's do."""
        twin = self.twin
        ReviewMachine.counts["jobs"] += 1
        while (job := self._next_job()) is not None:
            request, scored, _ = done(self.store.jobs.payload(job.id))
            if fate != "succeeds":
                end = self.store.jobs.finish(job.id, None, "x") if fate == "fails" else None
                done(end if end is not None else self.store.jobs.cancel(job.id))
                self._ended(request, None, set())
                continue
            base, target = twin.serving, max([0, *twin.parents]) + 1
            parents = done(self.store.jobs.parents(self.policy))
            marks = done(self.store.reviews.marks(self.policy))
            again = any(
                [value for version, value in twin.trained[subject] if version in twin.lineage][-1:]
                == [said]
                for subject, said in self._taught(request).items()
            )
            try:
                require_untrained(job.id, marks, steps_since(parents, base))
            except Conflict as error:
                assert again
                done(self.store.jobs.finish(job.id, None, str(error)))
                self._ended(request, None, set())
                ReviewMachine.counts["overtaken by a rollback"] += 1
                continue
            assert not again
            done(self.store.jobs.begin(job.id, base, target))
            if next(self.numbers) % 4 == 0:
                self.crash()
            batch = Batch(request, base, parents)
            preference = isinstance(request.config, wire.PreferenceConfig)
            if not preference:
                for ids in request.groups:
                    batch.add_group(*done(batch.read_group(self.store, scored, ids)))
                batch.settle()
                stale = {"groups.stale", "groups.rolled_back"} & set(batch.excluded)
                assert stale or set(batch.trained) == set(itertools.chain(*request.groups))
                ReviewMachine.counts["stale by then"] += bool(stale)
            made = preference or bool(batch.rows)
            version = target if made else base
            result = wire.TrainResult(policy=self.policy, version=version, metrics={}, excluded={})
            imitated = [one for pair in request.groups for one in pair] if preference else []
            done(
                self.store.jobs.finish(
                    job.id,
                    result,
                    None,
                    self._checkpoint(target, base) if made else None,
                    trained=batch.trained,
                    calls=[one.id for one in batch.calls],
                    imitated=imitated,
                    retrain=request.retrain,
                    lineage=steps_since(parents, base),
                )
            )
            if made:
                twin.parents[target], twin.serving = base, target
            self._ended(request, target if made else None, set(batch.trained))

    def _ended(self, request: wire.TrainRequest, made: int | None, trained: set[str]) -> None:
        """Write down what a job has trained, by its request and the runs that it has trained."""
        for subject, value in self._taught(request).items():
            assert self.twin.ordered[subject].pop(0) == value
            if made is None or (subject[1] != "correction" and subject[0] not in trained):
                continue
            past = [
                each for version, each in self.twin.trained[subject] if version in self.twin.lineage
            ]
            assert not past or past[-1] != value, (subject, past, value)
            self.twin.trained[subject].append((made, value))
            ReviewMachine.counts["verdicts trained"] += 1

    def _taught(self, request: wire.TrainRequest) -> dict[Subject, Any]:
        """The verdicts of a job's request."""
        taught: dict[Subject, Any] = {}
        if isinstance(request.config, wire.PreferenceConfig):
            for chosen, _ in request.groups:
                [turn] = done(self.store.trajectory(chosen)).trajectory.turns
                run = str(turn.messages[0]["content"])
                taught[run, "correction"] = (turn.reply or {})["content"]
        else:
            taught |= {(run, "run"): value for run, value in request.rewards.items()}
            taught |= {(c.removesuffix("-c"), "call"): v for c, v in request.turns.items()}
        return taught

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted({0, *self.twin.parents})))
        done(self.store.roll_back(self.policy, version, "why"))
        self.twin.serving = version

    @rule(run=consumes(runs))
    def delete_run(self, run: str) -> None:
        """A run whose trace Langfuse still has: what it says of it is refused from then on."""
        try:
            done(self.store.delete_trajectory(run))
        except Conflict:
            assert any(self.twin.ordered[run, kind] for kind in KINDS)
            return
        twin = self.twin
        for subject in [(run, kind) for kind in KINDS]:
            twin.langfuse.pop(subject, None)
            twin.server.pop(subject, None)
            twin.trained.pop(subject, None)
            self.scores.pop(subject, None)

    @rule()
    def crash(self, *, new: bool = False) -> None:
        """The server is killed; what the database has, or a `new` one, is all that it knows."""
        type(self).store.close()
        if new:
            type(self).database = f"sqlite:///{self.folder}/{next(self.numbers)}.sqlite3"
        type(self).store = Store(self.database)
        self.client = StoreClient(self.store, self.policy)

    # --- what is ---------------------------------------------------------------------------------

    @invariant()
    def what_was_trained_is_said(self) -> None:
        """Of each verdict on the server, the versions that saw it; of the policy, what serves."""
        assert done(self.store.served())[0][self.policy] == self.twin.serving

    def _next_job(self) -> wire.TrainJob | None:
        mine = done(self.store.jobs.page(10**6, policy=self.policy)).items
        return next((job for job in mine if not job.ended), None)

    def _checkpoint(self, version: int, parent: int | None) -> wire.Checkpoint:
        name = f"{self.policy}@{version}"
        known: dict[str, Any] = {"name": name, "policy": self.policy, "version": version}
        known |= {"parent": parent, "created_at": 1.0, "bytes": 1, "pinned": False}
        return wire.Checkpoint.model_validate(known | {"serving": True, "metrics": {}})

    def teardown(self) -> None:
        """In the end all is pulled and trained, and nothing is left that is due."""
        for _ in range(2):
            self.pull(everything=True, killed=False)
            self.train(None, [], killed=False, pulls=False, revised=False)
            self.work("succeeds")
        assert not self.twin.due(None)[0]
        service = service_of(self.store)
        reviews = done(self.store.reviews.of_policy(self.policy))
        asked = wire.ReviewTraining(policy=self.policy)
        lineage = self.twin.lineage
        for one in done(planned(service, asked, reviews))[0].plan.verdicts:
            kind = "correction" if one.kind == "correction" else "call" if one.call_id else "run"
            seen = [v for v, _ in self.twin.trained[one.trajectory, kind] if v in lineage]
            assert one.trained == tuple(f"{self.policy}@{version}" for version in seen)


@pytest.mark.soak("R1", SEQUENCES, f"sequences of {STEPS} steps")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 36_000))
def test_each_verdict_is_trained_once_with_its_last_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Langfuse's SDK reads the hints of its models for each answer: half of this test's time.
    kept = functools.lru_cache(None)(typing_extensions.get_type_hints)
    monkeypatch.setattr(typing_extensions, "get_type_hints", kept)
    ReviewMachine.folder = tmp_path
    ReviewMachine.database = f"sqlite:///{tmp_path / 'art.sqlite3'}"
    ReviewMachine.store = Store(ReviewMachine.database)
    try:
        run_state_machine_as_test(
            seed(38)(ReviewMachine),
            settings=settings(
                max_examples=SEQUENCES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        ReviewMachine.store.close()
    told = dict(ReviewMachine.counts)
    print(", ".join(f"{number} {what}" for what, number in told.items()))  # noqa: T201
    for what in (
        "pulls",
        "taken back",
        "jobs",
        "verdicts ordered",
        "verdicts trained",
        "stale by then",
    ):
        assert told[what] >= 1, told

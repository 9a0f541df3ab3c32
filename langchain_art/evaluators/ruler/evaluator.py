"""RULER: a judge that sees all runs of a scenario at once, and scores them relative to each other.

The idea (relative scores of a group, by a language model, without labels) is OpenPipe's RULER,
https://art.openpipe.ai/fundamentals/ruler. The prompt is in `prompt`, the parser in `reply_parser`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from langchain_core.messages import BaseMessage

from langchain_art.errors import ArtError, ConfigError, JudgeError
from langchain_art.evaluators import transcript
from langchain_art.evaluators.base import GroupEvaluator, Score
from langchain_art.evaluators.ruler import prompt
from langchain_art.evaluators.ruler.judge_model import (
    Judge,
    JudgeModel,
    Spent,
    is_final,
    retry_after,
    spent_on,
)
from langchain_art.evaluators.ruler.prompt import DEFAULT_RUBRIC, LEAST, Case, Names
from langchain_art.evaluators.ruler.reply_parser import UnusableReply, read
from langchain_art.wire import TrajectoryGroup

#: The score of runs that are all the same.
TIE = 0.5
_PAUSE = 0.5  # seconds after a call that raised, doubled for each attempt


def scenario_of(group: TrajectoryGroup) -> Any:
    """The group's scenario, which `gather` and `Trainer` put into its metadata."""
    return group.metadata.get("scenario")


class RulerEvaluator(GroupEvaluator):
    """Relative scores in [0, 1] with explanations, by a language model.

    The judge sees the scenario, the tools, and every run as a transcript with the names of its
    nodes. What runs share is shown once, long texts are cut. Runs have random ids, and scores are
    matched by id. If a reply is not exactly one score in [0, 1] for each run, the judge is asked
    again, with the reason; after `attempts` replies the group counts as not judged. No score is
    guessed.

    Equal runs get equal scores. If all of several runs are equal, the score is 0.5 without a call.

    Args:
        judge: a chat model of LangChain (`ChatART` for a model on our server); any other Runnable
            that answers messages, such as ``model.with_retry()``; or a name as litellm writes it,
            such as ``"openai/o3"`` (extra ``ruler``).
        rubric: the standards, in words.
        key: the score's name.
        passes: questions per group, whose scores are averaged: 1, or an even number, each pair an
            order and its reverse, which cancels a position bias. With a simulated judge, 2 more
            than halve the rank error under a bias, and 4 reduce it to about a third.
        context: gives the task's description in addition to the runs' prompts; None: nothing. By
            default the whole scenario: pass a function to hide fields from the judge.
        cache: an SQLite file for verdicts, keyed by the judge and the whole question; None: no
            cache. Use another file if a model's weights change under the same name.
        seed: of the order.
        output_tokens: approximately the most tokens of one tool output; at least 40.
        budget: approximately the most tokens of all quoted text.
        attempts: most questions per verdict, at least 1; none follows a refusal that the same
            question would get again (statuses such as 401). After a reply of "too many requests"
            all calls of the model wait as long as its ``Retry-After`` says, at most `timeout`.
        timeout: most seconds for one call of the judge; None: no limit of ours.
        litellm_params: see `Judge`.

    Raises:
        ConfigError: options that make no sense.

    Example::

        evaluator = RulerEvaluator("openai/o3", cache="judge.sqlite")
        Trainer(model, evaluator=evaluator)
        group = await evaluator.ainvoke(group)   # group.trajectories[0].reward
        print(evaluator.spent)
    """

    def __init__(
        self,
        judge: JudgeModel,
        rubric: str = DEFAULT_RUBRIC,
        *,
        key: str = "ruler",
        passes: int = 2,
        context: Callable[[TrajectoryGroup], Any] | None = scenario_of,
        cache: str | Path | None = None,
        seed: int = 0,
        output_tokens: int = 400,
        budget: int = 60_000,
        attempts: int = 3,
        timeout: float | None = 600.0,
        litellm_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(key)
        if output_tokens < LEAST or budget < 1 or attempts < 1:
            raise ConfigError(
                f"got {output_tokens=}, {budget=}, {attempts=}, expected at least {LEAST}, 1 and 1"
            )
        if passes != 1 and (passes < 1 or passes % 2):
            raise ConfigError(
                f"got {passes=}, expected 1 or an even number: an order, its reverse …"
            )
        if not rubric.strip():
            raise ConfigError("got an empty rubric, expected the standards to judge by, in words")
        self.judge = Judge(judge, litellm_params=litellm_params, timeout=timeout)
        self.rubric, self.passes, self.seed = rubric, passes, seed
        self._context = context
        self._cache = VerdictCache(cache) if cache is not None else None
        self._outputs, self._budget, self._attempts = output_tokens, budget, attempts
        self.spent, self._lock = Spent(), Lock()
        """Counts and costs of this evaluator so far."""

    @property
    def cost(self) -> float | None:
        """US dollars spent so far, of the calls whose price litellm knows; None: of none."""
        return None if self.spent.unpriced and not self.spent.cost else self.spent.cost

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        """One score per run.

        Raises:
            JudgeError: no usable verdict, or the group does not fit the budget.
        """
        try:
            scores = await self._scores(group)
        except Exception:
            self._count(Spent(unjudged=1))
            raise
        self._count(Spent(groups=1))
        return scores

    async def _scores(self, group: TrajectoryGroup) -> list[Score | None]:
        runs = group.trajectories
        if not runs:
            return []
        labelled = len({turn.label for run in runs for turn in run.turns}) > 1
        told = transcript.transcripts(runs, labelled=labelled)
        distinct = sorted(set(told), key=lambda blocks: [(b.kind, b.text) for b in blocks])
        if len(distinct) < 2 <= len(runs):
            self._count(Spent(decided=1))
            return [Score(TIE, f"All {len(runs)} runs are the same.") for _ in runs]
        task = self._context(group) if self._context is not None else None
        case = Case(
            task="" if task is None else transcript.as_text(task),
            tools=tuple(_tools(group, labelled)),
            runs=tuple(distinct),
        )
        by_transcript = dict(zip(distinct, await self._compared(case, group.id), strict=True))
        return [by_transcript[blocks] for blocks in told]

    async def _compared(self, case: Case, group: str) -> list[Score]:
        names = prompt.draw_names(case)
        found = await asyncio.gather(
            *(self._verdict(case, names, order, group) for order in self._orders(case)),
            return_exceptions=True,
        )
        passes: list[list[Score]] = []
        for one in found:
            if isinstance(one, BaseException):
                raise one
            passes.append(one)
        return [
            Score(fmean(score.value for score in scores), scores[0].explanation)
            for scores in zip(*passes, strict=True)
        ]

    def _orders(self, case: Case) -> list[list[int]]:
        """The orders in which to show the runs, one per pass; a single run has one pass."""
        seed = f"{self.seed}:{_digest(transcript.compact(astuple(case)))}"
        passes = self.passes if len(case.runs) > 1 else 1
        orders: list[list[int]] = []
        for number in range(0, passes, 2):
            order = list(range(len(case.runs)))
            random.Random(f"{seed}:{number}").shuffle(order)
            orders += [order, order[::-1]]
        return orders[:passes]

    async def _verdict(self, case: Case, names: Names, order: list[int], group: str) -> list[Score]:
        if self._cache is None:
            return await self._asked(self._question(case, names, order), names.ids, group)
        key = self._key(case, order)
        if (kept := await asyncio.to_thread(self._cache.get, key)) is not None:
            self._count(Spent(cached=1))
            return kept
        scores = await self._asked(self._question(case, names, order), names.ids, group)
        await asyncio.to_thread(self._cache.put, key, scores, str(self.judge))
        return scores

    async def _asked(
        self, question: list[BaseMessage], ids: Sequence[str], group: str
    ) -> list[Score]:
        again: list[BaseMessage] = []
        problem: Exception | None = None
        attempt = 0
        for attempt in range(self._attempts):
            self._count(Spent(calls=1))
            try:
                reply = await self.judge.ask([*question, *again], self.key)
                self._count(spent_on(reply))
                verdict = read(reply, ids)
                return [verdict[id_] for id_ in ids]
            except UnusableReply as error:
                problem, again = error, [prompt.asked_again(str(error))]
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - of any model; the last one is raised below
                problem = error
                if is_final(error):
                    break
                if (asked := retry_after(error)) is not None:
                    self.judge.pause(asked)
                elif attempt + 1 < self._attempts:
                    await asyncio.sleep(_PAUSE * 2**attempt)
            self._count(Spent(unusable=1))
        advice = " Try a stronger judge, smaller groups, or more attempts"
        raise JudgeError(
            f"{self.key}: no usable verdict on group {group!r} from {self.judge} in "
            f"{attempt + 1} attempts, expected one score in [0, 1] for each of {len(ids)} runs. "
            f"The last: {type(problem).__name__}: {problem}."
            + (advice if isinstance(problem, UnusableReply) else "")
        ) from problem

    def _question(self, case: Case, names: Names, order: list[int]) -> list[BaseMessage]:
        return prompt.messages(
            case, names, order, rubric=self.rubric, outputs=self._outputs, budget=self._budget
        )

    def _key(self, case: Case, order: list[int]) -> str:
        """A digest of the judge and the question, with fixed names instead of random ones."""
        names = Names("mark", tuple(f"run-{n}" for n in range(len(case.runs))))
        texts = [message.text for message in self._question(case, names, order)]
        return _digest("\0".join([self.judge.identity, *texts]))

    def _count(self, spent: Spent) -> None:
        with self._lock:
            self.spent += spent


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: JudgeModel = "openai/o3",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
) -> TrajectoryGroup | None:
    """Scores one group, as the function of that name in ART does.

    Example::

        group = await ruler_score_group(group, "openai/o3")

    Args:
        group: runs of one scenario.
        judge_model: see `RulerEvaluator`.
        extra_litellm_params: see `Judge`.
        rubric: the standards, in words.
        swallow_exceptions: give None where the group cannot be judged, instead of raising.

    Raises:
        JudgeError: the group cannot be judged.
        ConfigError: the judge or its parameters make no sense; raised in any case.
    """
    evaluator = RulerEvaluator(judge_model, rubric, litellm_params=extra_litellm_params)
    try:
        return await evaluator.ainvoke(group)
    except ArtError as error:
        if swallow_exceptions and not isinstance(error, ConfigError):
            return None
        raise


def _tools(group: TrajectoryGroup, labelled: bool) -> list[str]:
    """Each set of tools that calls had; of several, with the labels of these calls."""
    sets: dict[str, tuple[set[str], Sequence[dict[str, Any]]]] = {}
    for turn in (turn for run in group.trajectories for turn in run.turns if turn.tools):
        sets.setdefault(transcript.compact(turn.tools), (set(), turn.tools))[0].add(turn.label)
    named = labelled and len(sets) > 1
    return [
        (f"for {', '.join(sorted(nodes))}:\n" if named else "")
        + "\n".join(map(transcript.tool_line, tools))
        for _, (nodes, tools) in sorted(sets.items())
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


_TABLE = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, scores TEXT NOT NULL, judge TEXT NOT NULL, created REAL NOT NULL
)"""


class VerdictCache:
    """An SQLite file of verdicts, created if missing; for any threads and processes at once."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).expanduser()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # SQLite's default journal mode: changing it fails while others use the file.
            self._execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"got {str(path)!r} as the verdicts' file, expected an SQLite database that can be "
                f"written, or a path where one can be made: {error}"
            ) from error

    def get(self, key: str) -> list[Score] | None:
        """The scores stored under `key`, in the order in which they were put."""
        rows = self._execute("SELECT scores FROM verdicts WHERE key = ?", key)
        return [Score(*score) for score in json.loads(rows[0][0])] if rows else None

    def put(self, key: str, scores: Sequence[Score], judge: str) -> None:
        """Store a verdict; the first for a key stays. `judge` is the model's name, for people."""
        text = json.dumps([[score.value, score.explanation] for score in scores])
        insert = "INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)"
        self._execute(insert, key, text, judge, time.time())

    def _execute(self, statement: str, *values: str | float) -> list[Any]:
        # A connection for each use: SQLite's must not pass between threads, or survive a fork. It
        # waits for another process's write.
        with closing(sqlite3.connect(self._path, timeout=30)) as database, database:
            return database.execute(statement, values).fetchall()

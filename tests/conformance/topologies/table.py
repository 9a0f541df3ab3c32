"""The table in ``docs/topologies.md``: what the suite shows of each topology."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from tests.conformance.suite.harness import TOPOLOGIES, Topology
from tests.support.live_server import REPO

PAGE = REPO / "docs" / "topologies.md"
COLUMNS = ("captured", "exact tokens", "each token once", "judged", "trained")
EXAMPLES = ("create_agent with tools", "RetryPolicy around a chain")
"""Shown whole."""
HEAD = """\
# Graphs that are captured and trained

Each of these {count} topologies is a small LangGraph program. It is run against a real server
(`invoke`, `ainvoke`, `stream`, `astream`; fewer where one does not apply), and what was captured is
compared with the engine's own journal of the calls that it was asked for. `make test` runs each in
one of its modes, and trains a third; `make soak` runs all, and trains each in one mode.

- **captured**: the turns have the node, path, branch, step, attempt, thread and tags that the
  program gave them; every call that the engine made is a turn, once, and there is no other.
- **exact tokens**: prompt, reply and log-probabilities on record are the engine's, bit for bit.
- **each token once**: in the rows for the learner, every sampled token of every call that may train
  is trained once, behind exactly the tokens that the model was shown, and nothing else is trained.
- **judged**: the transcript gives back each prompt and reply as the engine had them, and an
  evaluator scores the run by it.
- **trained**: two runs, rewarded 0 and 1, make a training step of just those tokens; learner and
  sampler agree on their log-probabilities to 2e-5; what is excluded is counted by its reason.

Runs over several scopes and handlers, cancelled runs and streams that nobody reads to
their end are in `test_control_flow.py` and `test_cancelled.py`, graphs drawn at random in
`test_random_graphs.py`, all in `tests/conformance/topologies/`. The suite itself also runs against
[any other server](conformance.md).

Written by `python -m tests.conformance.topologies`.

## Adding one

A topology is a function in one of the files of `tests/conformance/suite/cases`. It takes a `Kit`,
which has the models, prompts that say what the model will answer, and the way (mode) in which to
run a graph; it yields each run and is sent its result. Above it stand its name and every model call
that it makes, in order: the path of nodes, what the reply says, LangGraph's step; and, of a call
that is not to be trained, why. Two of them, whole:

{examples}
`Kit`, `Expect` (whose `turns` and `line` say several calls at once) and all options of `topology`
(parallel branches, threads, runs that fail, fewer modes) are in
`tests/conformance/suite/harness.py`, nodes that call the model several times in `nodes.py` beside
it. To run a new one by itself, give pytest words of its name:

```bash
python -m pytest tests/conformance/topologies/test_topologies.py -k "fails and once"
```

`python -m tests.conformance.topologies` writes the page; `make test` compares it with the suite.

## The topologies

"""
REASONS = {
    "foreign": "of another provider's model",
    "other_policy": "of another policy, or of the base model",
    "greedy_decoding": "greedy",
    "superseded_error": "of an attempt that failed",
    "superseded_retried": "of an attempt that was made again",
    "superseded_interrupted": "of a node that was run again after an interrupt",
    "superseded_unchosen": "that the node did not return",
    "lost": "whose tokens are not on record",
}


def page() -> str:
    """The whole page. All of it holds if `test_topologies` passes."""
    lines = ["| topology | modes | " + " | ".join(COLUMNS) + " | remarks |"]
    lines.append("|---|---|" + "---|" * (len(COLUMNS) + 1))
    lines += [_line(case) for case in sorted(TOPOLOGIES.values(), key=_place)]
    examples = "\n".join(
        f"```text\n{inspect.getsource(TOPOLOGIES[name].program)}```\n" for name in EXAMPLES
    )
    return HEAD.format(count=len(TOPOLOGIES), examples=examples) + "\n".join(lines) + "\n"


def _place(case: Topology) -> tuple[str, int]:
    return case.program.__module__, list(TOPOLOGIES).index(case.name)


def _line(case: Topology) -> str:
    calls = len(case.expects)
    words = dict.fromkeys(COLUMNS, "yes")
    words["captured"] = f"{calls} call{'s' if calls > 1 else ''}"
    words["trained"] = f"{case.trained} of {calls}" if case.excluded else "all"
    return f"| {case.name} | {len(case.modes)} | {' | '.join(words.values())} | {_remarks(case)} |"


def _remarks(case: Topology) -> str:
    left = [f"{count} {REASONS[why]}" for why, count in case.excluded.items()]
    said: Iterable[str] = [f"not trained: {', '.join(left)}"] if left else []
    return "; ".join([*([case.remark] if case.remark else []), *said])

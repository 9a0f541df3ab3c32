"""A judge of known faults, behind OpenAI's API: it reads the prompt that it is really sent.

What it models, and what not. It is a careful reader: it finds each run in the prompt by the
prompt's own structure (ours or ART's), follows shared parts and notes, and sees what stands there
and nothing else. From that it takes the evidence that `workload.Evidence` is made of (it knows
which answer is right; a fact that was cut out of a tool's output it has not seen), and so the
quality. Its faults are added to that: noise, drawn anew for each run and place, and a bias for
places, as they are in this prompt. It models no other fault: it does not tire of long prompts, is
not swayed by wording, layout or length, and replies in the form asked for. So the figures compare
what the two ways of asking do about noise and places, and what they cost; they say nothing of how
well any real model reads either prompt.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tiktoken

from benchmarks.judging.workload import Evidence
from tests.support.json_server import JsonServer

EXPLANATION = (
    "It answers the question, and the mail that it relies on bears the answer out, but it takes "
    "more calls than it needs."
)


@dataclass(frozen=True)
class Faults:
    """How the judge errs.

    Attributes:
        noise: standard deviation.
        bias: what the favoured place gets over the least favoured one.
        shape: ``falling``: evenly from the first place to the last; ``first``: the first alone.
    """

    noise: float
    bias: float
    shape: str = "falling"

    def at(self, place: int, count: int) -> float:
        """What a place adds."""
        if self.shape == "first":
            return self.bias * (place == 0)
        return self.bias * (0.5 - place / max(1, count - 1))


@dataclass(frozen=True)
class Read:
    """One run as the judge found it in a prompt."""

    id: str
    calls: tuple[str, ...]
    results: tuple[str, ...]
    answer: str

    def evidence(self, fact: str) -> Evidence:
        return Evidence(
            right=fact in self.answer,
            grounded=any(fact in result for result in self.results),
            calls=len(self.calls),
            errors=sum(result.startswith("error") for result in self.results),
        )


def read_art(prompt: str) -> list[Read]:
    """The runs of a prompt of ART's RULER."""
    found: list[Read] = []
    for id_, text in re.findall(r'<trajectory id="(\d+)">\n(.*?)\n</trajectory>', prompt, re.S):
        messages = json.loads(text)
        calls = [c["function"] for m in messages for c in m.get("tool_calls") or ()]
        results = tuple(m["content"] for m in messages if m["role"] == "tool")
        said = tuple(f"{c['name']} {c['arguments']}" for c in calls)
        found.append(Read(id_, said, results, messages[-1]["content"]))
    return found


def read_ours(prompt: str) -> list[Read]:
    """The runs of a prompt of ours, with the parts that they follow and the notes put back."""
    mark = prompt.split("\n", 1)[0].split()[1]
    prompt = re.sub(rf"<{mark} cut \d+>\n", "", prompt)
    pieces = re.findall(rf"<{mark} ([^>]*)> ?(.*?)(?=\n?<{mark} |\Z)", prompt, re.S)
    notes: dict[str, str] = {}
    places: dict[str, list[tuple[str, str]]] = {}
    runs: list[str] = []
    current: list[tuple[str, str]] = []
    for tag, text in pieces:
        words = tag.split()
        if words[0] == "note":
            notes[words[1]] = text
        elif words[0] in ("part", "run"):
            follows = places[words[3]] if words[2:3] == ["follows"] else []
            current = places[words[1]] = list(follows)
            runs += [words[1]] if words[0] == "run" else []
        elif words[0] not in ("task", "tools", "end"):
            current.append((words[0], notes[words[2]] if words[1:2] == ["="] else text))
    return [
        Read(
            run,
            calls=tuple(text for kind, text in places[run] if kind == "call"),
            results=tuple(text for kind, text in places[run] if kind == "result"),
            answer=[text for kind, text in places[run] if kind == "assistant"][-1],
        )
        for run in runs
    ]


class SimulatedJudge(JsonServer):
    """A server of ``/v1/chat/completions``; the model's name says which faults it has.

    Args:
        facts: case -> the right answer.
        faults: model -> its faults.
    """

    def __init__(self, facts: Mapping[int, str], faults: Mapping[str, Faults]) -> None:
        super().__init__()
        self._facts, self._faults = facts, faults
        self._encoding = tiktoken.get_encoding("o200k_base")
        self.tokens = 0
        """Read and written so far."""
        self.base_url = f"{self.url}/v1"
        self._server.handle_error = lambda *_: None  # clients that go away  # type: ignore[assignment]

    def answer(self, path: str, body: Any) -> Any:
        prompt = body["messages"][1]["content"]
        is_art = "<trajectory id=" in prompt
        case = int(re.findall(r"Case (\d+):", prompt)[0])
        runs = read_art(prompt) if is_art else read_ours(prompt)
        faults = self._faults[body["model"]]
        scores = [
            {
                "trajectory_id" if is_art else "id": run.id,
                "explanation": EXPLANATION,
                "score": self._score(run, case, place, len(runs), faults),
            }
            for place, run in enumerate(runs)
        ]
        said = json.dumps({"scores": scores})
        read = sum(len(self._encoding.encode_ordinary(m["content"])) for m in body["messages"])
        written = len(self._encoding.encode_ordinary(said))
        self.tokens += read + written
        return {
            "id": "judged",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": said},
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": written,
                "total_tokens": read + written,
            },
        }

    def _score(self, run: Read, case: int, place: int, count: int, faults: Faults) -> float:
        quality = run.evidence(self._facts[case]).quality
        noise = random.Random(f"{case} {run.answer} {len(run.calls)} {place}").gauss(
            0, faults.noise
        )
        return round(min(1.0, max(0.0, quality + noise + faults.at(place, count))), 4)

"""A chat model that judges RULER's questions by what runs say last, and knows what is right."""

import json
from typing import Any

from langchain_core.messages import AIMessage

from examples.support.scripted_judge import read_runs
from tests.support.graphs import Answering


class RankingJudge(Answering):
    """1 for the right answer, 0.4 for one that shares a word with it, else 0."""

    right: str = "14 March"

    def choices(self, messages: Any) -> list[AIMessage]:
        scores = [
            {"id": name, "score": self.score(blocks[-1][1]), "explanation": f"says {blocks[-1][1]}"}
            for name, blocks in read_runs(messages[-1].text).items()
        ]
        return [AIMessage(json.dumps({"scores": scores}))]

    def score(self, said: str) -> float:
        if said == self.right:
            return 1.0
        return 0.4 if set(said.split()) & set(self.right.split()) else 0.0

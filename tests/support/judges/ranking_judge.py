"""A chat model that judges RULER's questions by what runs say last, and knows what is right."""

from __future__ import annotations

import json
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from examples.support.scripted_judge import read_runs


class RankingJudge(BaseChatModel):
    """1 for the right answer, 0.4 for one that shares a word with it, else 0."""

    right: str = "14 March"

    @property
    def _llm_type(self) -> str:
        return "ranking-judge"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        scores = [
            {"id": name, "score": self.score(blocks[-1][1]), "explanation": f"says {blocks[-1][1]}"}
            for name, blocks in read_runs(messages[-1].text).items()
        ]
        reply = AIMessage(json.dumps({"scores": scores}))
        return ChatResult(generations=[ChatGeneration(message=reply)])

    def score(self, said: str) -> float:
        if said == self.right:
            return 1.0
        return 0.4 if set(said.split()) & set(self.right.split()) else 0.0

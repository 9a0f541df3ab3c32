"""What makes a judge the same judge: settings that decide its replies, in any process."""

import subprocess
import sys
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda

from langchain_art import ChatART
from langchain_art.evaluators.ruler.judge_model import identity
from tests.support.live_server import REPO

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_art import ChatART
from langchain_art.evaluators.ruler.judge_model import identity

limit = 3
def parse(message):
    known = message.type in {"ai", "human", "tool", "system", "a", "b", "c", "d"}
    return message.text[:limit] if known else ""

model = ChatART(model="m", base_url="http://localhost:1", callbacks=[BaseCallbackHandler()])
for judge in (model, model.with_retry(), model.bind(stop=["x"]), model | RunnableLambda(parse)):
    print(identity(judge))
"""


def test_a_judge_is_the_same_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory addresses and the order of sets differ between processes; verdicts are found again."""
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, check=True, cwd=REPO,
        env={"PYTHONPATH": str(REPO), "PYTHONHASHSEED": "1"},
    ).stdout.split()  # fmt: skip
    exec(PROGRAM, {"__name__": "__main__"})
    assert capsys.readouterr().out.split() == other
    assert len(set(other)) == 4


def test_what_decides_replies_is_of_the_identity_and_what_watches_is_not() -> None:
    def of(**fields: Any) -> str:
        return identity(ChatART(**{"model": "m", "base_url": "http://localhost:1"} | fields))

    assert of() == of(callbacks=[BaseCallbackHandler()], tags=["x"], metadata={"y": object()})
    different = {of(), of(model="n"), of(temperature=0.5), of(base_url="http://localhost:2")}
    assert len(different) == 4
    model = ChatART(model="m", base_url="http://localhost:1")
    bound = {identity(model.bind(stop=[word])) for word in ("x", "y")}
    assert len(bound | {identity(model), identity(model.with_retry())}) == 4

    def closing_over(limit: int) -> RunnableLambda[Any, Any]:
        return RunnableLambda(lambda messages: messages[1].text[:limit])

    assert identity(closing_over(1)) == identity(closing_over(1)) != identity(closing_over(2))

"""The conformance model on our own server: it says scripts, and really samples."""

import math
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from langchain_art import ArtClient, ChatART, TrainConfig, capture
from langchain_art.wire import LoraConfig
from tests.conformance.suite.model import BLOCK
from tests.conformance.suite.scripts import script
from tests.support.live_server import ForkedServer


@pytest.fixture(scope="module")
def client(server: ForkedServer) -> Iterator[ArtClient]:
    with ArtClient(server.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def sdk(server: ForkedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(sdk: openai.OpenAI, *messages: Any, model: str = "tiny", **options: Any) -> Any:
    return sdk.chat.completions.create(model=model, messages=list(messages), **options)


def test_two_calls_of_one_prompt_sample_other_tokens(sdk: openai.OpenAI, client: ArtClient) -> None:
    said = "forty letters that are drawn one by one."
    records = [client.call(ask(sdk, user(script(said))).id) for _ in range(2)]
    one, other = (record["token_ids"] for record in records)
    assert len(one) == len(other) == len(said) + 1
    assert one != other  # by chance equal once in 2^40
    assert records[0]["prompt_token_ids"] == records[1]["prompt_token_ids"]
    for record in records:
        *texts, end = record["logprobs"]
        assert texts == pytest.approx([-math.log(2)] * len(said), abs=1e-5)
        assert end == pytest.approx(0, abs=1e-5)


def test_what_cannot_be_said_is_refused(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not this ⟦"):
        ask(sdk, user(script({"error": "not this ⟦"})))
    with pytest.raises(openai.BadRequestError, match=f"{BLOCK} bytes long, expected less"):
        ask(sdk, user(script("x" * BLOCK)))
    longest = "x" * (BLOCK - 1)
    assert ask(sdk, user(script(longest))).choices[0].message.content == longest


def test_training_leaves_the_scripts_as_they_are(
    server: ForkedServer, client: ArtClient, sdk: openai.OpenAI
) -> None:
    policy = client.create_policy(f"p-{uuid.uuid4().hex[:8]}", LoraConfig(rank=16)).name
    model = ChatART(model=policy, base_url=server.base_url)
    asked = script("It is Monday, I think.")
    for version in range(1, 3):
        runs: list[str] = []
        for reward in (0.0, 1.0):
            with capture(scenario="x") as run:
                model.invoke(asked)
            run.reward = reward
            client.post_trajectory(run.trajectory())
            runs.append(run.id)
        result = client.wait(client.train([runs], policy, TrainConfig(learning_rate=1e-5)))
        assert (result.version, result.excluded) == (version, {})
        assert result.metrics["grad_norm"] > 0
    for _ in range(3):
        answer = ask(sdk, user(asked), model=policy)
        assert answer.choices[0].message.content == "It is Monday, I think."

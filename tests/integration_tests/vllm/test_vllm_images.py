"""A graph's messages with images, sampled by the real vLLM behind our server, and trained."""

import base64
import hashlib
from pathlib import Path

import httpx
import pytest
from langchain_core.messages import HumanMessage

from langchain_art import ChatART, LocalServer, capture
from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS
from tests.support.seeing_agent import GROUPS, Agent
from tests.support.vision_models import picture, save_vision_model
from tests.support.vllm_engine import vllm_toml

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255))


async def test_an_agent_that_sees_on_vllm_is_recorded_and_takes_steps(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "model", hidden_size=64, head_dim=32)
    toml = vllm_toml(tmp_path / "art.toml")
    with LocalServer(
        model, policies=["seer"], data_dir=tmp_path / "data", options=("--config", str(toml))
    ) as server:
        agent = Agent(server.base_url, tmp_path / "fit", seed=1)
        done = await agent.trainer.fit(agent.rollout, range(2 * GROUPS), steps=2)
        for step in done.history:  # the second one of what the new version sampled
            metrics = step.results["seer"].metrics
            assert metrics["logprob_gap_max"] < 1e-4
            assert metrics["tokens_trained"] > 0
        chat = ChatART(model="seer", base_url=server.base_url, max_tokens=4)
        shown = [
            {"type": "image", "base64": base64.b64encode(one).decode(), "mime_type": "image/png"}
            for one in (RED, BLUE, RED)
        ]
        async with capture() as run:
            await chat.ainvoke([HumanMessage([{"type": "text", "text": "see "}, *shown])])
        (turn,) = run.trajectory().turns
        call = httpx.get(f"{server.base_url}/calls/{turn.call_id}").json()
    red, blue = (hashlib.sha256(one).hexdigest() for one in (RED, BLUE))
    assert call["request"]["images"] == [red, blue] and call["trainable"]
    own = [one for one in call["prompt_token_ids"] if one >= IMAGE_IDS]
    assert len(own) == 12 and own[:4] == own[8:] and not {*own[:4]} & {*own[4:8]}

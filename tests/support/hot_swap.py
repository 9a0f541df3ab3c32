"""Steps and rows of the tests that change versions under running calls."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx

from langchain_art_server.algorithms.sequences.training_rows import Row
from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import rewarded, trained


def train_once(http: httpx.Client, step: int, policy: str = "tiny") -> None:
    """A step of the policy from version `step` to the next."""
    ids: list[str] = []
    for seed in range(8):
        asked = {"model": policy, "seed": seed, "max_tokens": 4}
        ids.append(rewarded(http, f"swap-{policy}-{step}-{seed}", float(seed % 2), **asked))
    config = {"learning_rate": 3e-2}  # so large a step that mixed weights would show
    job = trained(http, [ids], policy, f"swap-{policy}-{step}", config=config)
    assert job["result"]["version"] == step + 1, job


def row_of(call: dict[str, Any]) -> Row:
    tokens = call["prompt_token_ids"] + call["token_ids"]
    nothing = [0.0] * len(tokens)
    return Row(tokens, [0] * len(tokens), nothing, nothing, call["temperature"])


def check_versions(
    server: LiveServer, records: list[dict[str, Any]], model: Path | None = None, policy: str = ""
) -> set[int]:
    """Each call's logprobs are those of the version that it says, computed by the learner.

    Returns the versions. By default, the server's model is in the folder ``model`` beside its data.
    """
    import torch

    from langchain_art_server.backends.peft.learner_core import LearnerCore

    by_version: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_version[record["version"]].append(record)
    torch.set_num_threads(1)
    core = LearnerCore(str(model or server.data_dir.parent / "model"))
    for version, calls in by_version.items():
        folder = server.data_dir / "adapters" / (policy or server.policy) / str(version)
        again = core.logprobs(folder, [row_of(call) for call in calls])
        for call, logprobs in zip(calls, again, strict=True):
            said = len(call["token_ids"])
            gaps = abs(logprobs[-said:] - call["logprobs"])
            assert max(gaps) <= 1e-3 and sum(gaps) / said <= 1e-4, (version, call["id"])
    return set(by_version)

"""openpipe-art's own code from trajectories to gradients; runs in an environment of its own.

``python child_art.py FOLDER MODE``: FOLDER holds the model, the adapter and ``rows.json``. For each
line on standard input it makes token rows of the trajectories, packs them, and takes every packed
row through mask, model, logprobs, loss and backward pass, as ``art.unsloth.train``'s
``compute_loss`` does with Unsloth's model in the place of PEFT's; it answers with the CPU seconds.
MODE ``local`` is what LocalBackend does: a row for each history, padded to a multiple of 2048;
``packed`` lets ART share prompts and fill rows of that length (``pack_results``, which only its
Megatron backend turns on; only the attention there follows the prompts' tree to its root, which is
done by the mask here).

The first step leaves ``gradient.safetensors``, and in ``packed.safetensors`` what ART made of the
rewards and the tokens, so that another learner can be given the same loss.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from art import Trajectory, TrajectoryGroup
from art.loss import LossInputs, loss_fn, shift_tensor
from art.preprocessing.pack import packed_tensors_from_tokenized_results
from art.preprocessing.tokenize import tokenize_trajectory_groups
from art.trajectories import LegacyHistory
from art.unsloth.train import _calculate_logprobs, calculate_attn_bias
from openai.types.chat.chat_completion import Choice
from peft import PeftModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
HERE, MODE = Path(sys.argv[1]), sys.argv[2]
#: ART's default for the positions whose logits are made at once.
CHUNK = 1024


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token i is the word ``wi``. ART asks it for the padding: replies bring their own tokens."""
    words = {f"w{i}": i for i in range(vocab)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w0", pad_token="w0")


def said(shown: list[int], ids: list[int], logprobs: list[float]) -> Choice:
    """A reply with its tokens and those of its prompt, as vLLM returns it to ART."""
    content = [
        {"token": f"token_id:{i}", "bytes": [], "logprob": p, "top_logprobs": []}
        for i, p in zip(ids, logprobs, strict=True)
    ]
    return Choice.model_validate(
        {
            "finish_reason": "stop",
            "index": 0,
            "logprobs": {"content": content},
            "message": {"role": "assistant", "content": " ".join(f"w{i}" for i in ids)},
            "prompt_token_ids": shown,
            "token_ids": ids,
        }
    )


def history(row: dict[str, Any]) -> LegacyHistory:
    """Stretches of a row: context is a user's message, what was trained a reply."""
    ids, mask = row["token_ids"], row["mask"]
    cuts = [0, *(i for i in range(1, len(ids)) if row["calls"][i] != row["calls"][i - 1]), len(ids)]
    parts: list[Any] = []
    for start, end in pairwise(cuts):
        if mask[start]:
            parts.append(said(ids[:start], ids[start:end], row["logprobs"][start:end]))
        else:
            text = " ".join(f"w{i}" for i in ids[start:end])
            parts.append({"role": "user", "content": text})
    return LegacyHistory(messages_and_choices=parts)


def trajectory_groups(told: dict[str, Any]) -> list[TrajectoryGroup]:
    runs: list[Trajectory] = []
    for run, reward in enumerate(told["rewards"]):
        first, *others = [history(row) for row in told["rows"] if row["run"] == run]
        runs.append(
            Trajectory(
                messages_and_choices=first.messages_and_choices,
                additional_histories=others,
                reward=reward,
            )
        )
    size = told["size"]
    return [TrajectoryGroup(runs[start : start + size]) for start in range(0, len(runs), size)]


def pack(groups: list[TrajectoryGroup], words: PreTrainedTokenizerFast) -> Any:
    """As ``LocalBackend._get_packed_tensors``."""
    results = list(tokenize_trajectory_groups(words, groups, False, True))
    longest = max(len(result.token_ids) for result in results)
    return packed_tensors_from_tokenized_results(
        results,
        math.ceil(longest / 2048) * 2048,
        pad_token_id=words.eos_token_id,
        truncate_long_results=False,
        pack_results=MODE == "packed",
    )


def tree_bias(group_ids: torch.Tensor, parent_ids: torch.Tensor) -> torch.Tensor:
    """As ``calculate_attn_bias``, where a segment sees not its parent alone but all above it."""
    groups, places = group_ids[0].unique(return_inverse=True)
    parents = dict(zip(group_ids[0].tolist(), parent_ids[0].tolist(), strict=True))
    sees = torch.zeros(len(groups), len(groups), dtype=torch.bool)
    for place, group in enumerate(groups.tolist()):
        while True:
            sees[place, torch.searchsorted(groups, group)] = True
            if parents[group] == group:
                break
            group = parents[group]
    mask = sees[places][:, places].tril()
    return torch.where(mask, 0.0, float("-inf"))[None]


def learn(packed: Any, model: Any) -> None:
    """As ``compute_loss``, for each packed row, and its backward pass."""
    head = model.get_output_embeddings().weight.t()
    tensors = {k: v for k, v in packed.items() if isinstance(v, torch.Tensor)}
    for at in range(len(packed["tokens"])):
        inputs: Any = {key: value[at : at + 1] for key, value in tensors.items()}
        ids = inputs["tokens"]
        tree = inputs["group_ids"], inputs["parent_ids"]
        if MODE == "packed":
            bias, positions = tree_bias(*tree), inputs["input_pos"]
        else:
            bias = calculate_attn_bias(*ids.shape, ids.device, *tree, torch.float32)
            positions = torch.arange(ids.shape[1])[None]
        hidden = model.get_base_model().model(
            input_ids=ids, attention_mask=bias[:, None], position_ids=positions, use_cache=False
        )[0]
        logprobs, entropies = _calculate_logprobs(head, hidden, shift_tensor(ids, 0), CHUNK)
        loss_fn(LossInputs(inputs=inputs), logprobs, None, entropies, {}).policy_loss.backward()


def main() -> None:
    told = json.loads((HERE / "rows.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, HERE, is_trainable=True).train()
    groups, words = trajectory_groups(told), tokenizer(told["vocab"])
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    print(json.dumps({"ready": True}), flush=True)
    while sys.stdin.readline():
        random.seed(0)
        begun = time.process_time()
        packed = pack(groups, words)
        tokenised = time.process_time() - begun
        learn(packed, model)
        seconds = time.process_time() - begun
        path = HERE / "gradient.safetensors"
        if not path.exists():
            grads = {n.replace(".default", ""): p.grad.clone() for n, p in trained.items()}
            save_file(grads, path)
            names = ("tokens", "assistant_mask", "weights", "advantages", "group_ids", "parent_ids")
            save_file(
                {name: packed[name].contiguous() for name in names}, HERE / "packed.safetensors"
            )
        for parameter in trained.values():
            parameter.grad = None
        answer = {"seconds": seconds, "tokenised": tokenised, "tokens": packed["tokens"].numel()}
        print(json.dumps(answer), flush=True)
        print(json.dumps({"ready": True}), flush=True)


if __name__ == "__main__":
    main()

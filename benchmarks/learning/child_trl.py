"""TRL's GRPOTrainer on given tokens; runs in an environment of its own, told line by line.

``python child_trl.py FOLDER BATCH [DEVICE]``: FOLDER holds the model, the adapter and
``rows.json``; BATCH rows go through the model at once. For each line on standard input it takes one
step (forward, backward; the learning rate is 0) and answers with the seconds from TRL's start of
the step to just before its optimizer (CPU time on a CPU, in float32; on a GPU, in bfloat16 with
gradient checkpointing, by the wall's clock) and the most bytes that a GPU had to hold. The first
step's gradient is left in ``gradient.safetensors``.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
HERE, BATCH = Path(sys.argv[1]), int(sys.argv[2])
DEVICE = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cpu")
ON_CPU = DEVICE.type == "cpu"
DTYPE = torch.float32 if ON_CPU else torch.bfloat16


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(vocab)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w0", pad_token="w0")


def now() -> float:
    """Seconds of a clock, once the device is done."""
    if ON_CPU:
        return time.process_time()
    torch.cuda.synchronize(DEVICE)
    return time.perf_counter()


class Steps(TrainerCallback):
    """Waits for a line before each step; reports before the optimizer's."""

    def __init__(self) -> None:
        self.model: Any = None
        self.begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        print(json.dumps({"ready": True}), flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self.begun = now()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        seconds = now() - self.begun
        path = HERE / "gradient.safetensors"
        if not path.exists():
            save_file(
                {
                    name.replace(".default", ""): parameter.grad.float().cpu()
                    for name, parameter in self.model.named_parameters()
                    if parameter.requires_grad
                },
                path,
            )
        peak = 0 if ON_CPU else torch.cuda.max_memory_allocated(DEVICE)
        print(json.dumps({"seconds": seconds, "peak_bytes": peak}), flush=True)


def load() -> Any:
    """The model under its adapter."""
    base: Any = AutoModelForCausalLM.from_pretrained(HERE, dtype=DTYPE)
    return PeftModel.from_pretrained(base.to(DEVICE), HERE, is_trainable=True)


def train(model: Any) -> None:
    """Take the steps."""
    told = json.loads((HERE / "rows.json").read_text())
    prompts, replies, masks = [], [], []
    for row in told["rows"]:
        start = row["mask"].index(1)
        prompts.append(row["token_ids"][:start])
        replies.append(row["token_ids"][start:])
        masks.append(row["mask"][start:])
    order: list[int] = []

    def rollout(asked: list[str], _trainer: Any) -> dict[str, Any]:
        """The runs of each scenario, in TRL's order of the scenarios."""
        order[:] = []
        for at, name in enumerate(asked):
            order.append(int(name) * told["size"] + at % told["size"])
        return {
            "prompt_ids": [prompts[i] for i in order],
            "completion_ids": [replies[i] for i in order],
            "logprobs": [[-1.0] * len(replies[i]) for i in order],
            "env_mask": [masks[i] for i in order],
        }

    def reward(**_: Any) -> list[float]:
        return [told["rewards"][i] for i in order]

    runs, steps = len(told["rewards"]), Steps()
    steps.model = model
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(HERE / "trl"),
            use_cpu=ON_CPU,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=runs // BATCH,
            num_generations=told["size"],
            max_completion_length=max(map(len, replies)),
            max_steps=1000,
            learning_rate=0.0,
            max_grad_norm=0.0,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="none",
            gradient_checkpointing=not ON_CPU,
            bf16=not ON_CPU,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": str(g)} for g in range(runs // told["size"])]),
        processing_class=tokenizer(told["vocab"]),
        rollout_func=rollout,
        callbacks=[steps],
    )
    trainer.train()


if __name__ == "__main__":
    train(load())

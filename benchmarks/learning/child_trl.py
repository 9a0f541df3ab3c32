"""TRL's GRPOTrainer on given tokens; runs in an environment of its own, told line by line.

``python child_trl.py FOLDER BATCH``: FOLDER holds the model, the adapter and ``rows.json``; BATCH
rows go through the model at once. For each line on standard input it takes one step (forward,
backward; the learning rate is 0) and answers with the CPU seconds from TRL's start of the step to
just before its optimizer. The first step's gradient is left in ``gradient.safetensors``.
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


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(vocab)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w0", pad_token="w0")


class Steps(TrainerCallback):
    """Waits for a line before each step; reports before the optimizer's."""

    def __init__(self) -> None:
        self.model: Any = None
        self.begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        print(json.dumps({"ready": True}), flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self.begun = time.process_time()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        seconds = time.process_time() - self.begun
        path = HERE / "gradient.safetensors"
        if not path.exists():
            save_file(
                {
                    name.replace(".default", ""): parameter.grad.clone()
                    for name, parameter in self.model.named_parameters()
                    if parameter.requires_grad
                },
                path,
            )
        print(json.dumps({"seconds": seconds}), flush=True)


def main() -> None:
    told = json.loads((HERE / "rows.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, HERE, is_trainable=True)
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
            use_cpu=True,
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
            gradient_checkpointing=False,
            bf16=False,
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
    main()

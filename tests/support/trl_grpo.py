"""TRL's GRPOTrainer on given tokens and rewards; runs in an environment that has TRL.

``python trl_grpo.py FOLDER``: FOLDER holds ``told.json``: cases, each with a model, the folder of
an adapter, and TRL's settings. Leaves the adapter's weights after the steps in each case's folder,
in ``after.safetensors``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.trl_child import save_trained, tokenizer

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


def train(case: dict[str, Any]) -> None:
    """Take the steps of a case: its runs stand group by group."""
    where, runs, size = Path(case["adapter"]), case["runs"], case["size"]
    base = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, where, is_trainable=True)
    order: list[int] = []

    def rollout(asked: list[str], _trainer: Any) -> dict[str, Any]:
        order[:] = [int(name) * size + at % size for at, name in enumerate(asked)]
        return {
            "prompt_ids": [runs[i]["prompt"] for i in order],
            "completion_ids": [runs[i]["reply"] for i in order],
            "logprobs": [[-1.0] * len(runs[i]["reply"]) for i in order],
        }

    def reward(**_: Any) -> list[float]:
        return [runs[i]["reward"] for i in order]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(where / "trl"),
            use_cpu=True,
            per_device_train_batch_size=len(runs),
            num_generations=size,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            gradient_checkpointing=False,
            bf16=False,
            disable_dropout=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **case["settings"],
        ),
        train_dataset=Dataset.from_list([{"prompt": str(g)} for g in range(len(runs) // size)]),
        processing_class=tokenizer(case["vocab"]),
        rollout_func=rollout,
    )
    trainer.train()
    save_trained(model, where)


if __name__ == "__main__":
    for told in json.loads((Path(sys.argv[1]) / "told.json").read_text()):
        train(told)

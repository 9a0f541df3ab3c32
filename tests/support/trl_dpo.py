"""TRL's DPOTrainer on given tokens; runs in an environment that has TRL.

``python trl_dpo.py FOLDER MODEL``: FOLDER holds the adapter and ``told.json``. Leaves the losses in
``losses.json`` and the adapter's weights after the steps in ``after.safetensors``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.trl_child import save_trained, tokenizer

torch.set_num_threads(1)
HERE, MODEL = Path(sys.argv[1]), sys.argv[2]


def words(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


class Recorded(DPOTrainer):
    """Keeps each step's loss as it is; what is logged may be rounded."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def main() -> None:
    told = json.loads((HERE / "told.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, HERE, is_trainable=True)
    trainer = Recorded(
        model=model,
        args=DPOConfig(
            output_dir=str(HERE / "trl"),
            use_cpu=True,
            per_device_train_batch_size=len(told["pairs"]),
            max_steps=told["steps"],
            beta=told["beta"],
            max_length=None,
            learning_rate=told["learning_rate"],
            lr_scheduler_type="constant",
            max_grad_norm=told["max_grad_norm"],
            adam_beta1=told["betas"][0],
            adam_beta2=told["betas"][1],
            adam_epsilon=told["eps"],
            weight_decay=0.0,
            gradient_checkpointing=False,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [{name: words(tokens) for name, tokens in one.items()} for one in told["pairs"]]
        ),
        processing_class=tokenizer(told["vocab"]),
    )
    for given, read in zip(told["pairs"], trainer.train_dataset, strict=True):
        assert {name: read[f"{name}_ids"] for name in given} == given
    trainer.train()
    (HERE / "losses.json").write_text(json.dumps(trainer.losses))
    save_trained(model, HERE)


if __name__ == "__main__":
    main()

"""TRL's racer: `GRPOTrainer` on a CPU; runs in an environment of packages of its own.

``python -m benchmarks.racing.child_trl FOLDER``. TRL has no schema without vLLM, so `transformers`'
``prefix_allowed_tokens_fn`` holds replies to `Told.replies`.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.racing.plan import Told, say
from examples.triage.tickets import tickets

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
#: Rows at once in the loss: three steps took 95 CPU seconds, with 8 rows 104, with 32 rows 103.
BATCH = 16


def department(reply: str) -> Any:
    """The department in a reply's JSON; None if the reply was cut."""
    try:
        return json.loads(reply)["department"]
    except ValueError:
        return None


def hold(model: Any, tokenizer: Any, replies: list[str]) -> None:
    """Let `model` generate one of `replies`, and nothing else."""
    allowed: dict[tuple[int, ...], set[int]] = {}
    end = tokenizer.eos_token_id
    for reply in replies:
        ids = [*tokenizer(reply, add_special_tokens=False)["input_ids"], end]
        for at, token in enumerate(ids):
            allowed.setdefault(tuple(ids[:at]), set()).add(token)
    free = model.generate

    def generate(*args: Any, **given: Any) -> Any:
        start = given["input_ids"].shape[1]

        def following(_: int, ids: torch.Tensor) -> list[int]:
            return sorted(allowed.get(tuple(ids[start:].tolist()), {end}))

        return free(*args, prefix_allowed_tokens_fn=following, **given)

    model.generate = generate


class HandOver(TrainerCallback):
    """Saves the adapter and reports it after every step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rewards: list[float] = []

    def on_step_end(self, _args: Any, state: Any, _control: Any, **given: Any) -> None:
        adapter = self._folder / "adapters" / str(state.global_step)
        given["model"].save_pretrained(adapter)
        say(state.global_step, adapter, sum(self.rewards) / len(self.rewards))
        self.rewards.clear()


def main() -> None:
    folder = Path(sys.argv[1])
    told = Told.read(folder)
    known = tickets("train", told.messages, told.seed)
    asked = [known[number] for number in told.order]
    hand_over = HandOver(folder)

    def reward(completions: list[Any], right: list[str], **_: Any) -> list[float]:
        found = [
            float(department(said[-1]["content"]) == wanted)
            for said, wanted in zip(completions, right, strict=True)
        ]
        hand_over.rewards += found
        return found

    tokenizer = AutoTokenizer.from_pretrained(told.base)
    model: Any = AutoModelForCausalLM.from_pretrained(told.base, dtype=torch.float32)
    hold(model, tokenizer, list(told.replies))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=told.groups * told.size // BATCH,
            num_generations=told.size,
            max_completion_length=told.max_tokens,
            max_steps=told.steps,
            learning_rate=told.rate,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            seed=told.seed,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [
                {
                    "prompt": [
                        {"role": "system", "content": told.system},
                        {"role": "user", "content": one.message},
                    ],
                    "right": one.department,
                }
                for one in asked
            ]
        ),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[hand_over],
    )
    trainer.train()


if __name__ == "__main__":
    main()

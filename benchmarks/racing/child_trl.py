"""TRL's racer: `GRPOTrainer` with an environment; runs in an environment of packages of its own.

The model reads what our agent's model reads: the tools' descriptions are written into the chat
template, since TRL would derive others from the methods. Parsing ends a run at a call of
``answer``, which is no tool here; its argument is what the reward reads.
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

from benchmarks.racing.answers import answers
from benchmarks.racing.plan import Told, say
from examples.email_search.inbox import Inbox, MailStore

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
#: Rows that go through the model at once in the loss.
BATCH = 16
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r'\s*<tool_call>(?!\s*\{"name": "answer")',
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


class Mailbox:
    """The tools of one run."""

    def __init__(self, mails: MailStore) -> None:
        self._mails = mails
        self._inbox: Inbox | None = None

    def reset(self, inbox: int, **_: Any) -> None:
        """Open the inbox of a scenario."""
        self._inbox = self._mails.inbox(inbox)

    def search(self, query: str) -> str:
        """Search the inbox.

        Args:
            query: Words.
        """
        assert self._inbox is not None
        return self._inbox.search(query)

    def read(self, mail_id: int) -> str:
        """Read a mail.

        Args:
            mail_id: Its number.
        """
        assert self._inbox is not None
        return self._inbox.read(mail_id)


class HandOver(TrainerCallback):
    """Saves the adapter and reports it after every so many steps."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self.rewards: list[float] = []

    def on_step_end(self, _args: Any, state: Any, _control: Any, **given: Any) -> None:
        step: int = state.global_step
        if step % self._every == 0:
            adapter = self._folder / "adapters" / str(step)
            given["model"].save_pretrained(adapter)
            say(step, adapter, sum(self.rewards) / len(self.rewards))
        self.rewards.clear()


def main() -> None:
    folder = Path(sys.argv[1])
    told = Told.read(folder)
    mails = MailStore(told.mails)
    known = mails.scenarios("train")
    asked = [known[number] for number in told.scenarios]
    by_id = {one.id: one for one in known}
    hand_over = HandOver(folder, told.every)

    def reward(
        completions: list[list[dict[str, Any]]], scenario: list[str], **_: Any
    ) -> list[float]:
        found = [
            float(len(said) == 1 and by_id[name].is_answer(said[0]))
            for name, said in zip(scenario, map(answers, completions), strict=True)
        ]
        hand_over.rewards += found
        return found

    tokenizer = AutoTokenizer.from_pretrained(told.base)
    tokenizer.chat_template = (
        "{%- set tools = " + json.dumps(told.tools) + " %}" + tokenizer.chat_template
    )
    tokenizer.response_template = RESPONSE
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(told.base, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=told.groups * told.size // BATCH,
            num_generations=told.size,
            max_completion_length=1024,
            generation_kwargs={"max_new_tokens": told.max_tokens},
            max_tool_calling_iterations=told.max_calls - 1,
            max_steps=told.steps,
            learning_rate=told.rate,
            lr_scheduler_type="constant",
            beta=0.0,
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
                        {"role": "user", "content": one.question},
                    ],
                    "scenario": one.id,
                    "inbox": one.inbox,
                }
                for one in asked
            ]
        ),
        processing_class=tokenizer,
        environment_factory=lambda: Mailbox(mails),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[hand_over],
    )
    trainer.train()


if __name__ == "__main__":
    main()

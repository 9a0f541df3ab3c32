"""openpipe-art's own saving and finding of checkpoints; runs in an environment of its own.

``python child_art.py KILLS SEED``. `save_checkpoint` is what its LocalBackend calls after each
step, `get_last_checkpoint_dir` what it starts from. Its trainer is Unsloth's, which needs a GPU;
here is the class of transformers in its place, whose `save_model` Unsloth's inherits. A start loads
what it finds with PEFT, and Adam's state from the file that ART's `load_optimizer_state` reads.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from art.local.checkpoints import get_last_checkpoint_dir
from art.unsloth.service import save_checkpoint
from peft import PeftModel
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.killing.loop import killed, only
from benchmarks.killing.models import adapted, base, fill, numbers

model, optimizer = adapted()
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[])
trainer = Trainer(model=model, args=arguments, optimizers=(optimizer, None))


def save(folder: Path, number: int) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        save_checkpoint(trainer, str(folder))  # type: ignore[arg-type]


def start(folder: Path) -> dict[str, Any]:
    found = get_last_checkpoint_dir(str(folder))
    assert found is not None
    loaded = PeftModel.from_pretrained(base(), found)
    weights = only(numbers(p for name, p in loaded.named_parameters() if "lora_" in name))
    state = Path(found, "optimizer.pt")
    kept = None
    if state.exists():
        states = torch.load(state)["state"].values()
        kept = only(numbers(tensor for one in states for tensor in one.values()))
    return {"weights": weights, "optimizer": kept}


if __name__ == "__main__":
    print(
        json.dumps(
            killed(partial(fill, optimizer), save, start, int(sys.argv[1]), int(sys.argv[2]))
        )
    )

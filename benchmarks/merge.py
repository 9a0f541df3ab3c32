"""What `export --merge` loses of an update, by the base's type and by the update's size.

A model, the demo's base or the folder in MERGE_MODEL, learns replies in supervised steps of our
learner, in float32 at rank 16. Each adapter is merged into the model in each type, and into the
bfloat16 one with --float32 (``exact``). ``trained_STEPS_at_RATE`` is the KL divergence from the
adapter to the base in nats a token, ``lost_TYPE_…`` that to what was written over it.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.email_search.train import BASE_MODEL
from langchain_art.wire import LoraConfig, SFTConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.merge_adapter import merge
from langchain_art_server.quantize_base import quantized
from tests.support.learner_cases import quiet

#: Steps, learning rate.
UPDATES = ((1, 1e-5), (4, 1e-5), (16, 1e-5), (4, 1e-4), (16, 1e-4))
REPLIES = (
    "Ann wrote about the Falcon project on March 3rd, and nobody has answered her.",
    "I found no mail of that name. I searched the inbox for Ann, then for the project.",
    'To count words, split the text: `len(text.split())`. For "a b" that is 2.',
)
TYPES = ("float32", "bfloat16", "float16")


def bases(model: Path, folder: Path) -> dict[str, Path]:
    """The model by the type of its weights."""
    made = {name: folder / name for name in TYPES}
    for name, path in made.items():
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, name))
        loaded.save_pretrained(path)
        AutoTokenizer.from_pretrained(model).save_pretrained(path)
    if importlib.util.find_spec("bitsandbytes"):
        made["nf4"] = quantized(str(made["float32"]), folder, "cpu", "bfloat16")
    return made


def learned(base: Path, folder: Path) -> dict[tuple[int, float], Path]:
    """The adapters, each from the base on."""
    core, tokenizer = LearnerCore(str(base), "cpu", "float32"), AutoTokenizer.from_pretrained(base)
    rows: list[Row] = []
    for ids in tokenizer(list(REPLIES)).input_ids:
        mask = [0] + [1] * (len(ids) - 1)
        ones = [float(one) for one in mask]
        rows.append(Row(ids, mask, [0.0] * len(ids), ones, 1.0))
    new, made = folder / "new", dict[tuple[int, float], Path]()
    new.mkdir()
    core.init_adapter(new, LoraConfig(rank=16, alpha=32.0))
    for steps, rate in UPDATES:
        parent = new
        for step in range(1, steps + 1):
            out = folder / f"{steps}-{rate:g}-{step}"
            out.mkdir()
            config = SFTConfig(learning_rate=rate)
            core.step(LearnerStep(parent, out, step, rows, config), quiet)
            parent = out
        made[steps, rate] = parent
    return made


def run() -> tuple[dict[str, float], dict[str, object]]:
    """The figures, and what they were measured on."""
    disable_progress_bar()
    model = Path(os.environ.get("MERGE_MODEL", BASE_MODEL))
    figures = dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="art-merge-") as name:
        folder = Path(name)
        (adapters := folder / "adapters").mkdir()
        known = bases(model, folder)
        for (steps, rate), adapter in learned(known["float32"], adapters).items():
            told = {kind: merge(str(base), adapter, folder / "out") for kind, base in known.items()}
            told["exact"] = merge(str(known["bfloat16"]), adapter, folder / "out", float32=True)
            update = f"{steps}_at_{rate:g}"
            figures[f"trained_{update}"] = told["float32"].trained
            figures |= {f"lost_{kind}_{update}": one.lost for kind, one in told.items()}
    return figures, {"model": model.name}

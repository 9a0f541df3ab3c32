"""Unsloth's own trainer (TRL's, with its kernels and its loss) on given tokens; see `child_trl`."""

# ruff: noqa: I001 - Unsloth patches transformers, PEFT and TRL, so it is imported before them
from __future__ import annotations

import json

from unsloth import FastLanguageModel  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from typing import Any

from child_trl import DEVICE, DTYPE, HERE, ON_CPU, train


def load() -> Any:
    """The model under its adapter, both as Unsloth makes them."""
    base = HERE / "base"  # without the adapter's files, which it would take for another model
    base.mkdir()
    for file in [*HERE.glob("*.safetensors*"), *HERE.glob("*.json")]:
        if not file.name.startswith(("adapter", "rows")):
            (base / file.name).hardlink_to(file)
    lora = json.loads((HERE / "adapter_config.json").read_text())
    model, _ = FastLanguageModel.from_pretrained(
        str(base),
        dtype=DTYPE,
        load_in_4bit=False,
        use_exact_model_name=True,
        **({} if ON_CPU else {"device_map": {"": DEVICE}}),
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=lora["r"],
        lora_alpha=lora["lora_alpha"],
        target_modules=lora["target_modules"],
        use_gradient_checkpointing=False if ON_CPU else "unsloth",
    )
    set_peft_model_state_dict(model, load_file(HERE / "adapter_model.safetensors"))
    return model


if __name__ == "__main__":
    train(load())

"""A model with a LoRA adapter of 14 MB, and Adam's state for it; for both savers."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **size, **heads))


def adapted() -> tuple[PeftModel, torch.optim.AdamW]:
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model: Any = get_peft_model(base(), LoraConfig(r=64, lora_alpha=64, target_modules=layers))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def fill(optimizer: torch.optim.AdamW, number: int) -> None:
    """Every weight, and every number of Adam's state, becomes `number`."""
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.fill_(number)
            state = optimizer.state[parameter]
            state["step"] = torch.tensor(float(number))
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.full_like(parameter, number)


def numbers(tensors: Any) -> set[float]:
    """All numbers in tensors."""
    return {one for tensor in tensors for one in tensor.detach().unique().tolist()}

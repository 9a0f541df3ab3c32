"""One of two ranks with a part of a model each: takes a step, says what it holds, and fails."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.distributed.data_parallel import (
    DataParallelCore,
    decoder_layers,
)
from langchain_art_server.backends.peft.distributed.process_group import Ranks
from tests.support.learner_cases import make_rows, take


def main(rank: int, meeting: str, model: str, parent: str, out: str) -> None:
    ranks = Ranks(rank, 2, f"file://{meeting}", torch.device("cpu"))
    core = DataParallelCore(model, "cpu", None, ranks, shard=True)
    if rank == 0:
        packer.MEMORY_SHARE = 0.0  # its layers are computed twice, those of rank 1 are not
    metrics = take(core, Path(parent), Path(out), make_rows(12))
    weights = [
        p
        for layer in decoder_layers(core.base)
        for name, p in layer.named_parameters()
        if "lora_" not in name
    ]
    held = [p.to_local().numel() for p in weights if isinstance(p, DTensor)]
    found = {
        "held": sum(held),
        "gathered": len(weights) - len(held),
        "bytes_per_token": core.packer._measured(),  # pyright: ignore[reportPrivateUsage]
        "checkpointed": metrics["checkpointed"],
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    if rank == 0:
        decoder_layers(core.base)[1].register_forward_hook(fail)
    take(core, Path(parent), Path(out), make_rows(12), step=2)


def fail(_layer: nn.Module, _args: object, _outputs: object) -> None:
    raise torch.OutOfMemoryError("as one rank may, on its way")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

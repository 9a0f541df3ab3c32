"""Our learner's writing of an adapter, and the store that publishes it: ``KILLS SEED``."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.killing.loop import killed, only
from benchmarks.killing.models import adapted, fill, numbers
from langchain_art_server.backends.peft.adapter_io import (
    load_optimizer,
    load_weights,
    write_adapter,
)
from langchain_art_server.policies.adapter_store import AdapterStore

model, optimizer = adapted()
parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}


def save(folder: Path, number: int) -> None:
    store = AdapterStore(folder)
    staged = store.stage()
    write_adapter(staged, b"{}", parameters, optimizer)
    store.publish(staged, "p", number, {"version": number})


def start(folder: Path) -> dict[str, Any]:
    store = AdapterStore(folder)
    newest = store.versions("p")[-1]
    store.check("p", newest)
    optimizer.state.clear()
    load_weights(store.path("p", newest), parameters)
    load_optimizer(store.path("p", newest), parameters, optimizer)
    kept = (tensor for one in optimizer.state.values() for tensor in one.values())
    return {"weights": only(numbers(parameters.values())), "optimizer": only(numbers(kept))}


if __name__ == "__main__":
    print(
        json.dumps(
            killed(partial(fill, optimizer), save, start, int(sys.argv[1]), int(sys.argv[2]))
        )
    )

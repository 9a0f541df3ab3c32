"""The learner's ways one by one: ``python -m benchmarks.gpu.variants [--model NAME] [--small]``.

One step with each alone: its seconds, its peak memory, and the distance of its gradient from that
of the way in which everything is kept. In 16 bits a second run of that way says what rounding does.

Writes ``out/bench/gpu/variants-NAME.json`` after each variant.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.learner import (
    conditions,
    console,
    keep,
    make_core,
    methods,
    peak_bytes,
    settle,
    take,
)
from benchmarks.gpu.parts import arguments
from benchmarks.learning.methods import Method, distance
from benchmarks.learning.workloads import few_tokens, long_agent
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.packer import Way
from langchain_art_server.backends.peft.recompute import Recompute

Around = Callable[[LearnerCore], AbstractContextManager[None]]


def kept(way: Way, *, offload: bool = False) -> Around:
    """Whatever costs least, this way is taken."""

    @contextmanager
    def around(core: LearnerCore) -> Generator[None]:
        packer, set_way = core.packer, core.packer._keep
        packer.offload = offload
        try:
            with mock.patch.object(packer, "_keep", lambda _: set_way(way)):
                yield
        finally:
            packer.offload = False

    return around


@contextmanager
def layers_of_transformers(core: LearnerCore) -> Generator[None]:
    """Norms, attention and MLPs are transformers' own, and keep what those keep."""
    changed = {one: vars(one).pop("forward") for one in core.base.modules() if _is_ours(one)}
    try:
        with kept(Way.PLAIN)(core):
            yield
    finally:
        for module, forward in changed.items():
            vars(module)["forward"] = forward


def _is_ours(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func.__module__ == Recompute.__module__


#: Name -> what the step is taken in. The first is what the others are compared with.
VARIANTS: dict[str, Around] = {
    "everything kept": kept(Way.PLAIN),
    "everything kept, once more": kept(Way.PLAIN),
    "norms, attention and MLPs of transformers": layers_of_transformers,
    "what is cheap computed again": kept(Way.AGAIN),
    "layers computed again": kept(Way.CHECKPOINT),
    "layers computed again, inputs on the host": kept(Way.CHECKPOINT, offload=True),
}


def main() -> None:
    given = arguments(__doc__, "variants", rounds={"type": int, "default": 3})
    device, rounds = given.device, 1 if given.small else given.options.rounds
    core = make_core(given.name, device, torch.float32 if given.small else torch.bfloat16)
    rows = (few_tokens() if given.small else long_agent()).rows()
    forest, apart = methods()
    seen: dict[str, Any] = {}
    found = conditions("variants", given.name, device) | {"rounds": rounds, "variants": seen}
    for way in (Way.PLAIN, Way.AGAIN):
        core.packer._measured(way)  # before a variant takes the choice from the packer
    reference: dict[str, torch.Tensor] | None = None
    rowwise = {"rows end to end, everything kept": (apart, VARIANTS["everything kept"])}
    ways: dict[str, tuple[Method, Around]] = {n: (forest, one) for n, one in VARIANTS.items()}
    for name, (method, around) in (ways | rowwise).items():
        settle(device)
        with around(core):
            _, gradient = take(core, method, rows)
            peak = peak_bytes(device)
            reference = reference or gradient
            apart_by = distance(reference, gradient)
            seconds = statistics.median(take(core, method, rows)[0] for _ in range(rounds))
        seen[name] = {
            "seconds": seconds,
            "peak_bytes": peak,
            "tokens": method.tokens,
            "gradient_distance": apart_by,
        }
        keep(given.path, found)
        console.print(name, seen[name])


if __name__ == "__main__":
    main()

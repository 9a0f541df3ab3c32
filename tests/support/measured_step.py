"""Takes a learner's step of COUNT rows of one LENGTH, and says what memory that took.

``python -m tests.support.measured_step FOLDER DTYPE LENGTH COUNT``; the folder has the model.
"""

import json
import sys
from pathlib import Path

import torch

from langchain_art.wire import ClippedRatio, LoraConfig, TrainConfig
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.learner_cases import quiet


def memory(name: str) -> int:
    """Bytes but those mapped of files: libraries, whose pages a forked process has not touched.

    Not getrusage: its peak is the parent's where that had more at the fork.
    """
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return (int(lines[name].split()[0]) - int(lines["RssFile"].split()[0])) * 1024


def main(folder: Path, dtype: str, length: int, count: int) -> None:
    torch.set_num_threads(1)
    before = memory("VmRSS")
    core = LearnerCore(str(folder / "model"), "cpu", dtype)
    (folder / "v0").mkdir()
    (folder / "v1").mkdir()
    core.init_adapter(folder / "v0", LoraConfig(rank=8, alpha=16.0))
    rows: list[Row] = []
    for k in range(count):
        ids = [(7919 * (k + 1) + 31 * t) % 4000 for t in range(length)]
        mask = [0] + [1] * (length - 1)
        rows.append(Row(ids, mask, [-8.0 * m for m in mask], [(-1.0) ** k * m for m in mask]))
    config = TrainConfig(
        learning_rate=2e-5,
        loss=ClippedRatio(importance_sampling=None),
        guard=None,
        max_logprob_gap=None,
        max_kl=None,
        tokens_per_microbatch=length * count,
    )
    alive = core.batch(rows, config).packing.alive
    core.step(LearnerStep(folder / "v0", folder / "v1", 1, rows, config), quiet)
    found = {
        "bytes": memory("VmHWM") - before,
        "alive": alive,
        "checkpointed": core.packer.checkpoints,
        "token": core.packer._measured(),  # pyright: ignore[reportPrivateUsage]
        "parameters": core.info["parameters"],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))

"""Time and tokens of every method on every workload, as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

PATH = Path("out/bench/learner.png")


def plot(found: dict[str, dict[str, dict[str, float]]]) -> Path:
    """Bars: CPU time over ours; dots: tokens over distinct tokens. On a scale of powers of two."""
    mpl.use("Agg")
    figure = Figure(figsize=(11, 7), layout="constrained")
    for place, (workload, methods) in enumerate(found.items()):
        axes = figure.add_subplot(2, 2, place + 1)
        names = list(methods)
        times = [methods[name]["time_ratio"] for name in names]
        tokens = [methods[name]["token_ratio"] for name in names]
        axes.barh(names, times, color=["#2a6f97", *["#b8c4cc"] * (len(names) - 1)])
        axes.plot(tokens, names, "o", color="#bc4749", label="tokens ÷ distinct tokens")
        for name, value in zip(names, times, strict=True):
            axes.text(value * 1.03, name, f"{value:.2f}", va="center", fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.5, 2 * max([*times, *tokens]))
        axes.axvline(1, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_title(workload.replace("_", " "))
        axes.set_xlabel("CPU time of a step ÷ ours")
        if place == 0:
            axes.legend(fontsize=8, loc="lower right")
    PATH.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PATH, dpi=130)
    return PATH

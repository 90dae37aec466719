"""The figure of `scale.py`: seconds and memory against size, both logarithmic, beside lines of known growth."""

import math
from collections.abc import Mapping
from typing import Any

import matplotlib


def plot(path: str, clients: Mapping[int, Mapping[str, float]], layers: Mapping[int, Mapping[str, float]]) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    _panel(left, clients, 1, "linear")
    left.set(title="A round", xlabel="clients that take part")
    _panel(right, layers, 3, "cubic")
    right.set(title="The server's merge of one n×n layer", xlabel="n")
    figure.savefig(path, dpi=130)


def _panel(axes: Any, numbers: Mapping[int, Mapping[str, float]], power: int, growth: str) -> None:
    sizes = sorted(numbers)
    seconds = [numbers[size]["seconds"] for size in sizes]
    memory = [max(numbers[size]["memory"], 1) for size in sizes]
    slope = math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2])
    guide = [seconds[-1] * (size / sizes[-1]) ** power for size in sizes]
    lines = axes.loglog(sizes, seconds, "o-", color="#2b6cb0", label=f"seconds, slope {slope:.2f} at the end")
    lines += axes.loglog(sizes, guide, "--", color="#a0aec0", linewidth=1, label=f"{growth} growth")
    for size, value in zip(sizes, seconds, strict=True):
        text = f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
        axes.annotate(text, (size, value), (-6, 8), textcoords="offset points", color="#2b6cb0", ha="right")
    other = axes.twinx()
    lines += other.loglog(sizes, memory, "s-", color="#dd6b20", markersize=4, label="peak memory")
    for size, value in zip(sizes, memory, strict=True):
        other.annotate(
            f"{value:.0f}", (size, value), (0, -16), textcoords="offset points", color="#dd6b20", ha="center"
        )
    other.set(ylim=(0.5, 50 * max(memory)))
    other.set_ylabel("MiB", color="#dd6b20")
    axes.set_ylabel("seconds", color="#2b6cb0")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.margins(x=0.28, y=0.12)
    other.minorticks_off()
    axes.legend(handles=lines, frameon=False, loc="lower right")
    for each in (axes, other):
        each.spines["top"].set_visible(False)

"""Where a model's parameters and MACs are, layer by layer, and what is left of them in its low-rank tiers."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from fedhm.cost import LayerCost

COLOURS = matplotlib.color_sequences["tab10"]


def save_layers(tiers: Mapping[str, Mapping[str, LayerCost]], path: Path) -> Path:
    """`tiers` holds the costs by layer of each tier, all with the same layers."""
    first = next(iter(tiers.values()))
    layers = [name for name in first if any(costs[name].macs for costs in tiers.values())]  # norms would be invisible
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    height = 0.8 / len(tiers)
    for axes, title, what in ((left, "parameters", "parameters"), (right, "MACs per sample", "macs")):
        for number, (tier, costs) in enumerate(tiers.items()):
            places = np.arange(len(layers)) + (number - (len(tiers) - 1) / 2) * height
            values = [getattr(costs[layer], what) for layer in layers]
            axes.bar(places, values, height, color=COLOURS[number % len(COLOURS)], label=tier)
        axes.set_xticks(np.arange(len(layers)), layers, fontsize=8, rotation=30 if len(layers) > 6 else 0)
        axes.yaxis.set_major_formatter(EngFormatter())
        axes.set_axisbelow(True)
        axes.set_title(title, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    left.legend(title="tier", fontsize=8)
    figure.savefig(path)
    return path

"""The figure of `tiers.py`: how much of the saving arrives, and what a step's time is made of."""

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib

from layer_times import REST, SGD

KINDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "3×3 convolutions": ("#2b6cb0", lambda part: part.startswith("3×3")),
    "first, 1×1, classifier": ("#90cdf4", lambda part: part in ("first convolution", "1×1 shortcuts", "classifier")),
    "BatchNorm": ("#dd6b20", lambda part: part == "BatchNorm"),
    REST: ("#fbd38d", lambda part: part == REST),
    SGD: ("#a0aec0", lambda part: part == SGD),
}


def plot(
    path: str, model: str, rows: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, Mapping[str, float]]
) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    left.plot([0, 1], [0, 1], color="#a0aec0", linestyle="--", linewidth=1)
    left.text(0.68, 0.6, "all of the saving", color="#718096", rotation=40, rotation_mode="anchor")
    for key, label, colour in [("time", "time", "#2b6cb0"), ("tensors", "memory of tensors", "#dd6b20")]:
        values = [getattr(row[key], "median", row[key]) for row in rows.values()]
        left.plot([row["MACs"] for row in rows.values()], values, "o-", color=colour, label=label)
        if key == "time":
            for row, value in zip(rows.values(), values, strict=True):
                left.annotate(
                    f"{row['tier']}  {value:.2f}", (row["MACs"], value), (10, -14), textcoords="offset points"
                )
    left.set(
        xlim=(0, 1.12),
        ylim=(0, 1.06),
        xlabel="MACs, as a share of the full model's",
        ylabel="share of the full model's",
    )
    left.set_title(f"{model}: a training step by tier", fontsize=11)
    left.legend(loc="lower right", frameon=False)

    bottoms = dict.fromkeys(seconds, 0.0)
    for kind, (colour, belongs) in KINDS.items():
        shares = {
            tier: rows[tier]["time"].median * sum(s for part, s in parts.items() if belongs(part)) / sum(parts.values())
            for tier, parts in seconds.items()
        }
        right.bar(list(seconds), list(shares.values()), 0.6, bottom=list(bottoms.values()), color=colour, label=kind)
        bottoms = {tier: bottoms[tier] + shares[tier] for tier in seconds}
    for position, row in enumerate(rows.values()):
        right.hlines(
            row["MACs"],
            position - 0.38,
            position + 0.38,
            color="black",
            linewidth=1.5,
            label="MACs" if not position else None,
        )
    right.set(xlabel="tier", ylabel="share of the full model's time", ylim=(0, 1.06))
    right.set_title("What the time is made of", fontsize=11)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)

"""Accuracy, or another headline metric, against latency and size, over all tiers and formats."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedhm.config.sections.objective import Metric
from fedhm.machine.files import write_atomically

Point = tuple[str, str, float, int, Mapping[str, float]]  # tier, kind of file, seconds, bytes, metrics
MARKERS = "osD^v"


def draw(points: Sequence[Point], metric: Metric, path: Path) -> Path:
    """Draw both plots side by side, with a mark for each kind of file and the tier beside it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_time, by_size = figure.subplots(1, 2, sharey=True)
    kinds = list(dict.fromkeys(kind for _, kind, *_ in points))
    for kind, marker in zip(kinds, MARKERS, strict=False):
        own = [point for point in points if point[1] == kind and metric.name in point[4]]
        values = [metric.scaled(point[4][metric.name]) for point in own]
        for axes, numbers in (
            (by_time, [1e3 * point[2] for point in own]),
            (by_size, [point[3] / 1e3 for point in own]),
        ):
            axes.plot(numbers, values, marker, label=kind)
            for tier, x, y in zip([point[0] for point in own], numbers, values, strict=True):
                axes.annotate(tier, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    by_time.set(xlabel="latency of one sample, one thread (ms)", ylabel=metric.axis("test"), xscale="log")
    by_size.set(xlabel="size on disk (kB)", xscale="log")
    for axes in (by_time, by_size):
        axes.margins(x=0.12, y=0.1)  # room for the names
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(MaxNLocator(5) if high < 8 * low else LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    by_size.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(path, picture.getvalue())
    return path

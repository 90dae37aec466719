"""The ranks and parameters of every tier's network, layer by layer, as its file has them."""

from collections.abc import Sequence

from fedhm.measure.cost import ROOT
from fedhm.report.page.content.curves import hex_colours
from fedhm.report.page.plot import Line, Plot
from fedhm.report.sheets import Sheet
from fedhm.runs.history import Run

MOST_LAYERS = 60  # of the plot: more could not be told apart


def parameters_by_layer(run: Run, runs: Sequence[Run]) -> Plot | None:
    """Return bars for the layers that have most of the parameters; None before models are written."""
    if not run.layers:
        return None
    names = list(dict.fromkeys(name for layers in run.layers.values() for name in layers))
    sizes = {name: max(layers[name].parameters for layers in run.layers.values() if name in layers) for name in names}
    names = [name for name in names if sizes[name] > max(sizes.values()) / 200]  # norms would be invisible
    chosen = sorted(sorted(names, key=lambda name: -sizes[name])[:MOST_LAYERS], key=names.index)
    colours = hex_colours(runs)
    lines = [
        Line(
            tier,
            [float(place) for place, name in enumerate(chosen) if name in layers],
            [layers[name].parameters for name in chosen if name in layers],
            colours.get(tier, "#888888"),
            kind="bars",
            run=run.name,
            tier=tier,
            hints=[_rank(layers[name].rank) for name in chosen if name in layers],
        )
        for tier, layers in run.layers.items()
    ]
    total = "; ".join(f"{tier} {sum(layer.parameters for layer in of.values()):,}" for tier, of in run.layers.items())
    return Plot(
        title=f"parameters by layer of {run.name}",
        x_label="layer",
        y_label="parameters",
        lines=lines,
        summary=f"Parameters of the layers that have most of them, a bar for each tier. All layers together: {total}.",
        categories=chosen,
        decimals=0,
        numbers=_sheet(run),
    )


def _sheet(run: Run) -> Sheet:
    """Return a row for each layer: parameters and, where it is factorized, the rank of each tier."""
    names = list(dict.fromkeys(name for layers in run.layers.values() for name in layers))
    rows = []
    for name in names:
        found = [layers.get(name) for layers in run.layers.values()]
        cells = ("" if each is None else f"{each.parameters:,}{_short(each.rank)}" for each in found)
        rows.append([name or ROOT, *cells])
    note = "Parameters, and r, the rank, of a layer that is factorized; the others are dense."
    return Sheet(["layer", *run.layers], [rows], left=1, note=note)


def _rank(rank: int | None) -> str:
    return "dense" if rank is None else f"rank {rank}"


def _short(rank: int | None) -> str:
    return "" if rank is None else f" (r {rank})"

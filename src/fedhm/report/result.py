"""`Result`, which `fedhm.run` returns: the records, models and costs of a finished run, in hand."""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedhm.adapters.adapted import save_adapter
from fedhm.config.objective import Metric, Metrics
from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.measure.cost import Cost
from fedhm.report.format import format_bytes, format_macs, format_parameters
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.history import Run
from fedhm.server.record import ClientMetrics, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Summary(str):
    """A text that an interpreter shows as it is printed, with its lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Result:
    """The records, models and costs of a finished run. `summary`, `frame` and `plot` show it."""

    records: list[Record]
    networks: dict[str, nn.Module]  # the final model of every tier
    costs: dict[str, Cost]
    best_round: int = 0  # of a run that may stop early ([stop]); 0: none
    best: dict[str, nn.Module] = field(default_factory=dict)  # every tier's model after the best round
    config: Config = field(default_factory=Config)

    def save_adapter(self, tier: str, folder: str | Path) -> None:
        """Save a tier's adapter, if the method trains adapters, for `PeftModel.from_pretrained(base, folder)`."""
        if tier not in self.networks:
            raise FedhmError(f"there is no tier '{tier}', known are {', '.join(self.networks)}")
        save_adapter(self.networks[tier], Path(folder))

    @property
    def metrics(self) -> dict[str, Metrics]:
        """Return the metrics of every tier's final model."""
        return self.records[-1].metrics

    @property
    def clients(self) -> dict[str, ClientMetrics]:
        """Return the metrics of every tier's final model at the clients; empty if they have no test samples."""
        return self.records[-1].clients

    def __repr__(self) -> str:
        headline = self._reported[0]
        values = ", ".join(
            f"{tier}: {headline.shown(found[headline.name])}"
            for tier, found in self.metrics.items()
            if headline.name in found
        )
        return f"<fedhm.Result of {self.config.method.name}, {len(self.records)} rounds, {headline.name} {values}>"

    def __str__(self) -> str:
        return str(self.summary())

    @property
    def _reported(self) -> list[Metric]:
        known = next(iter(self.metrics.values()), Metrics())
        return [metric for metric in self.config.objective.reported if metric.name in known] or [
            Metric(name) for name in known
        ]

    def summary(self) -> Summary:
        """Return a short table: the cost and the final metrics of every tier."""
        metrics = self._reported
        rows = [["tier", "parameters", "MACs", "size", *(metric.name for metric in metrics)]]
        for tier, found in self.metrics.items():
            cost = self.costs[tier]
            costs = [format_parameters(cost.parameters), format_macs(cost.macs), format_bytes(cost.bytes)]
            rows.append([tier, *costs, *(metric.shown(found[metric.name]) for metric in metrics)])
        widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        stopped = f", stopped early: {self.records[-1].stopped}" if self.records[-1].stopped else ""
        return Summary("\n".join([f"{self.config.method.name}, {len(self.records)} rounds{stopped}", *lines]))

    def frame(self) -> Any:
        """Return a pandas frame with a row for each evaluated round and tier."""
        try:
            pandas: Any = import_module("pandas")
        except ImportError:
            raise FedhmError("result.frame() returns a frame of pandas: pip install pandas") from None
        rows = []
        for record in self.records:
            for tier, found in record.metrics.items():
                traffic = record.traffic.get(tier)
                trained = {"train_loss": traffic.loss if traffic and traffic.answers else None}
                sent = {"bytes_down": traffic.down if traffic else 0, "bytes_up": traffic.up if traffic else 0}
                clients = sum(participant.tier == tier for participant in record.participants)
                rows.append({"round": record.round, "tier": tier, **found, "clients": clients, **trained, **sent})
        return pandas.DataFrame(rows)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Return a figure of matplotlib: the first metric of every tier by round. With a path, save it as PNG, too."""
        from fedhm.report.plot import render_matplotlib, save_png
        from fedhm.report.plots import metric_plots

        data = DataFacts(classes=0, input_shape=(), clients=0, samples=0, digest="")
        run = Run(self.config.method.name, self.config, self.records, self.costs, data)
        plot = metric_plots([run], self._reported[0])["round"]
        if path is not None:
            save_png([plot], Path(path))
        return render_matplotlib([plot])

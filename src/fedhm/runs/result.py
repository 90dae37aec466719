"""The result of a run, for the caller of `fedhm.run`."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from fedhm.adapters.adapted import save_adapter
from fedhm.config.objective import Metrics
from fedhm.errors import FedhmError
from fedhm.measure.cost import Cost
from fedhm.server.record import ClientMetrics, Record


@dataclass(frozen=True)
class Result:
    """The records, models and costs of a finished run."""

    records: list[Record]
    networks: dict[str, nn.Module]  # the final model of every tier
    costs: dict[str, Cost]
    best_round: int = 0  # of a run that may stop early ([stop]); 0: none
    best: dict[str, nn.Module] = field(default_factory=dict)  # every tier's model after the best round

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

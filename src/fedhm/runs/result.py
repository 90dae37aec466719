"""What a run comes to, for who started it."""

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
    records: list[Record]
    networks: dict[str, nn.Module]  # the final model of every tier
    costs: dict[str, Cost]
    best_round: int = 0  # the best one of a run that could end early ([stop]), and every tier's model after it
    best: dict[str, nn.Module] = field(default_factory=dict)

    def save_adapter(self, tier: str, folder: str | Path) -> None:
        """Save a tier's adapter, of a method that trains such, for `PeftModel.from_pretrained(base, folder)`."""
        if tier not in self.networks:
            raise FedhmError(f"there is no tier '{tier}', known are {', '.join(self.networks)}")
        save_adapter(self.networks[tier], Path(folder))

    @property
    def metrics(self) -> dict[str, Metrics]:
        """Return the metrics of every tier's final model."""
        return self.records[-1].metrics

    @property
    def clients(self) -> dict[str, ClientMetrics]:
        """Return how every tier's final model does at the clients; empty where they have no test samples."""
        return self.records[-1].clients

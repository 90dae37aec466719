"""Runs as values: `Run`, which is read back from a run's folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.machine.files import check_utf8_name
from fedhm.measure.cost import Cost
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.folder import (
    CONFIG_FILE,
    COSTS_FILE,
    DATA_FILE,
    RECORDS_FILE,
    read_costs,
    read_run_facts,
    read_settings,
)
from fedhm.runs.models import Layer, best_round_on_disk, read_layers, tier_file
from fedhm.runs.rounds import check_records, existing_checkpoints, read_records, round_of
from fedhm.server.record import Record, Traffic


@dataclass(frozen=True)
class Run:
    name: str
    config: Config
    records: list[Record]
    costs: dict[str, Cost]
    data: DataFacts
    best: int = 0  # the round of the best models on disk; 0: none
    layers: dict[str, dict[str, Layer]] = field(default_factory=dict)  # by tier and name, once models are written
    fingerprint: str = ""

    @property
    def tiers(self) -> list[str]:
        return list(self.costs)

    @property
    def evaluated(self) -> list[Record]:
        return [record for record in self.records if record.metrics]

    @property
    def complete(self) -> bool:
        """Tell whether the run is over: all rounds are done, or it stopped early."""
        return len(self.records) >= self.config.train.rounds or bool(self.records and self.records[-1].stopped)

    @property
    def evaluated_at_clients(self) -> bool:
        """Tell whether the server had no test set: metrics are then those of the clients' pooled test samples."""
        pooled = {tier: found.overall.pooled for tier, found in self.evaluated[-1].clients.items()}
        return str(pooled) == str(self.evaluated[-1].metrics)  # as text, NaN equals NaN

    def bytes_per_client(self, tier: str) -> float | None:
        """Return the measured bytes of training, both ways, per round and participant of a tier; None if none."""
        return self._per_client(tier, lambda traffic: traffic.down + traffic.up)

    def macs_per_client(self, tier: str) -> float | None:
        """Return the MACs of training per round and participant of a tier; None if it never had one."""
        return self._per_client(tier, lambda traffic: traffic.macs)

    def _per_client(self, tier: str, what: Callable[[Traffic], int]) -> float | None:
        # a round with several attempts names only the participants of the last one
        records = [record for record in self.records if record.attempts == 1] or self.records
        spent = sum(what(record.traffic[tier]) for record in records if tier in record.traffic)
        clients = sum(p.tier == tier for record in records for p in record.participants)
        return spent / clients if clients else None

    @property
    def turns(self) -> float:
        """Return the number of rounds that a client took part in, averaged over all clients."""
        return sum(len(record.participants) for record in self.records) / self.config.federation.clients

    def seconds_so_far(self) -> list[float]:
        """Return the simulated seconds up to the end of each round; empty for a run without devices."""
        timed = [record.simulated for record in self.records if record.simulated]
        return list(accumulate(each.seconds for each in timed)) if len(timed) == len(self.records) else []

    @property
    def gathers_gradients(self) -> bool:
        """Tell whether clients compute gradients in every round."""
        return self.config.evaluation.diagnostics == "theory"

    def statistics_bytes(self) -> float:
        """Return the measured bytes of BatchNorm statistics, both ways, per participant of an evaluated round.

        If clients compute gradients in every round, these are counted too, and per participant of any round.
        """
        total = sum(record.statistics.down + record.statistics.up for record in self.records)
        counted = self.records if self.gathers_gradients else self.evaluated
        return total / max(1, sum(len(record.participants) for record in counted))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read each folder once; a run is named by its folder, or by its whole path if two folders have the same name."""
    paths = list({path.resolve(): path for path in paths}.values())
    runs = [_read(path) for path in paths]
    names = [run.name for run in runs]
    return [replace(r, name=str(p)) if names.count(r.name) > 1 else r for r, p in zip(runs, paths, strict=True)]


def _read(path: Path) -> Run:
    check_utf8_name(path.resolve())
    if not path.is_dir():
        raise FedhmError(
            f"{path} is a file, not the folder of a run" if path.exists() else f"there is no folder {path}"
        )
    seen = max(map(round_of, existing_checkpoints(path / "checkpoints")), default=0)  # first: the run may go on
    settings, facts = read_settings(path), read_run_facts(path)
    if settings.digest != facts.settings:
        raise FedhmError(f"{path}/{CONFIG_FILE} belongs to another run than {path}/{DATA_FILE}")
    config, costs = settings.config, read_costs(path, facts.run)
    records = read_records(path / RECORDS_FILE, facts.run)
    if len(records) < seen:
        raise FedhmError(
            f"{path}/{RECORDS_FILE} lacks rounds: it holds {len(records)}, and there is a checkpoint of {seen}"
        )
    best = best_round_on_disk(path / "models", len(records))
    layers = {tier: read_layers(tier_file(path / "models", tier), tier, facts.run) for tier in costs}
    layers = {tier: found for tier, found in layers.items() if found}
    run = Run(path.resolve().name, config, records, costs, facts.data, best, layers, facts.run)
    for record in run.evaluated:
        if odd := record.metrics.keys() ^ run.costs.keys():
            raise FedhmError(
                f"{path}/{COSTS_FILE} and round {record.round} of {path}/{RECORDS_FILE} name other tiers: {min(odd)}"
            )
    check_records(path / RECORDS_FILE, records, config.objective.headline.name, costs)
    return run

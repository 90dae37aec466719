"""What a run leaves in its folder: costs and plans, checkpoints, and the models of its best and last round."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from fedhm.measure.cost import Cost
from fedhm.networks.exchange import set_packing
from fedhm.networks.spec import NetworkSpec
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.folder import RunFolder
from fedhm.runs.models import load_best_models, remove_other_best_models, save_best_models
from fedhm.runs.rounds import Checkpoint
from fedhm.server.callbacks import Callback, RunState
from fedhm.server.filters.optimizer import ServerOptimizer
from fedhm.server.state import check_state


class Planning(Protocol):
    """What the files of a run show of a method (`methods/method.py`)."""

    tiers: tuple[str, ...]
    state_type: type[Any]

    def spec(self, tier: str, state: Any = None) -> NetworkSpec: ...
    def network(self, spec: NetworkSpec) -> nn.Module: ...
    def planned_ranks(self, state: Any) -> dict[str, dict[str, int]]: ...


@dataclass
class PlanFiles(Callback):
    """Writes what every tier costs. Where tiers are budgets, it notes new ranks in the record and in the folder."""

    method: Planning
    folder: RunFolder | None
    costs: Callable[[Any], dict[str, Cost]]  # of every tier, in a state of the method
    data: DataFacts | None  # None: the folder has them already, from when all remote clients were there
    _plans: dict[str, dict[str, int]] = field(default_factory=dict)

    def run_begins(self, run: RunState) -> None:
        self._plans = self.method.planned_ranks(run.state)
        if self.folder and self.data:
            self.folder.save_data_facts(self.data)
        self._save(run)

    def round_ends(self, run: RunState) -> None:
        plans = self.method.planned_ranks(run.state)
        if plans != self._plans:
            run.record.plans = self._plans = plans
            self._save(run)

    def _save(self, run: RunState) -> None:
        if self.folder:
            self.folder.save_costs(self.costs(run.state))
            if self._plans:
                self.folder.save_plans(self._plans)


@dataclass
class BestModels(Callback):
    """Keeps every tier's model after the best round, of a run that may end early."""

    method: Planning
    folder: RunFolder | None

    def round_ends(self, run: RunState) -> None:
        if run.best_round == run.record.round:
            run.best = run.networks
            if self.folder:
                save_best_models(self.folder.models, run.best_round, run.networks, self.folder.run)

    def round_saved(self, run: RunState) -> None:
        if self.folder:  # only now that a better round counts: a killed run still has the models of its best round
            remove_other_best_models(self.folder.models, run.best_round)

    def run_ends(self, run: RunState) -> None:
        if not self.folder:
            return
        self.folder.save_models(run.networks)
        remove_other_best_models(self.folder.models, run.best_round)
        if not run.best:  # the best round was found before this process resumed the run
            networks = self._networks_of_best_round(run)
            run.best = load_best_models(self.folder.models, run.best_round, networks, self.folder.run)

    def _networks_of_best_round(self, run: RunState) -> dict[str, nn.Module]:
        """Return networks of the ranks that were planned up to the best round, to load its models into."""
        plans = next((record.plans for record in reversed(run.records[: run.best_round]) if record.plans), {})
        specs = {tier: self.method.spec(tier) for tier in self.method.tiers}
        specs |= {tier: replace(specs[tier], ranks=tuple(ranks.items())) for tier, ranks in plans.items()}
        return {tier: set_packing(self.method.network(spec), None) for tier, spec in specs.items()}


@dataclass
class Checkpoints(Callback):
    """Writes every round's record and state. A round counts once its checkpoint is on disk."""

    method: Planning
    folder: RunFolder | None
    fingerprint: str  # of the run
    optimizer: ServerOptimizer

    def run_begins(self, run: RunState) -> None:
        if not run.records:
            check_state(run.state, self.method.state_type)

    def round_ends(self, run: RunState) -> None:
        if run.record.round == 1:  # fields that were empty at the start have values now
            check_state(run.state, self.method.state_type)
        if self.folder:
            checkpoint = Checkpoint(run.record.round, run.state, self.optimizer.moments)
            self.folder.commit(run.record, checkpoint, self.fingerprint, run.config.checkpoints.keep)

"""Federated learning for devices that are not alike.

There is one global model. Every client trains the largest low-rank version of it that the client can afford. The
server recovers each version to full shape, averages them, and factorizes the result for the next round. The flow:

    data → federation (one set of samples per client)
    method.tasks(state, participants, round) → engine.run(tasks) → work.run on the client → updates
         → filters (admission, defence, privacy) → method.merge(state, updates, round)
         → filters (privacy, server optimizer) → state
         → evaluate each tier by the objective → record → callbacks (checkpoint, best models, progress, trackers)

`experiment.py` holds that loop, and `assembly.py` puts its parts together. `methods/` has a file for each method, and
`lowrank/` the mathematics. `run` trains your own model on your own data. `resume` finishes a run in a folder. `export`
writes a tier's model for a device. A new method is a `MethodConfig` (its settings) and a `Method` (what runs). An
`Objective` defines the loss and the metrics. A `Watcher` follows a run, as the trackers in `tracking/` do.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhm import models, tracking
    from fedhm.assembly import assemble
    from fedhm.config.loading import load_config
    from fedhm.config.method import MethodConfig
    from fedhm.config.objective import Metric, Metrics, Objective
    from fedhm.config.schema import Config
    from fedhm.data.federation import Federation
    from fedhm.data.samples import Preprocessing, Samples
    from fedhm.errors import FedhmError
    from fedhm.experiment import Experiment
    from fedhm.export.api import export
    from fedhm.export.write import Exported
    from fedhm.lowrank.hybrid import to_full, to_hybrid
    from fedhm.lowrank.layers import LowRankConv1d, LowRankConv2d, LowRankLinear
    from fedhm.lowrank.plan import RankPlan, plan_ranks
    from fedhm.measure.cost import Cost, measure, training_memory
    from fedhm.measure.fit import Fit, fit
    from fedhm.methods.method import Method, ModelState, Setup, State
    from fedhm.networks.exchange import Tensors
    from fedhm.networks.spec import NetworkSpec
    from fedhm.objectives.classification import Classification
    from fedhm.objectives.multilabel import MultiLabel
    from fedhm.objectives.regression import Regression
    from fedhm.objectives.segmentation import Segmentation
    from fedhm.report.result import Result
    from fedhm.run import prepare, resume, run
    from fedhm.runs.models import load_tier
    from fedhm.server.callbacks import About, RunWatcher, Watcher
    from fedhm.server.record import Record
    from fedhm.work.messages import Participant, Task, Update

    __version__: str

__all__ = [
    "About", "Classification", "Config", "Cost", "Experiment", "Exported", "Federation", "FedhmError", "Fit",
    "LowRankConv1d", "LowRankConv2d", "LowRankLinear", "Method", "MethodConfig", "Metric", "Metrics", "ModelState",
    "MultiLabel", "NetworkSpec",
    "Objective",
    "Participant", "Preprocessing", "RankPlan", "Record", "Regression", "Result", "RunWatcher", "Samples",
    "Segmentation", "Setup", "State", "Task", "Tensors", "Update",
    "Watcher", "assemble", "export", "fit",
    "load_config", "load_tier", "measure", "models", "plan_ranks", "prepare", "resume", "run", "to_full", "to_hybrid",
    "tracking", "training_memory",
]  # fmt: skip

# Where each of these names lives: nothing is imported before one of its names is used, for torch takes seconds.
_HOMES = {
    "assembly": "assemble",
    "config.method": "MethodConfig",
    "config.objective": "Metric Metrics Objective",
    "config.loading": "load_config",
    "config.schema": "Config",
    "data.federation": "Federation",
    "data.samples": "Preprocessing Samples",
    "errors": "FedhmError",
    "experiment": "Experiment",
    "export.api": "export",
    "export.write": "Exported",
    "lowrank.hybrid": "to_full to_hybrid",
    "lowrank.layers": "LowRankConv1d LowRankConv2d LowRankLinear",
    "lowrank.plan": "RankPlan plan_ranks",
    "measure.cost": "Cost measure training_memory",
    "measure.fit": "Fit fit",
    "methods.method": "Method ModelState Setup State",
    "networks.exchange": "Tensors",
    "objectives.classification": "Classification",
    "objectives.multilabel": "MultiLabel",
    "objectives.regression": "Regression",
    "objectives.segmentation": "Segmentation",
    "networks.spec": "NetworkSpec",
    "run": "prepare resume run",
    "report.result": "Result",
    "runs.models": "load_tier",
    "server.record": "Record",
    "server.callbacks": "About RunWatcher Watcher",
    "work.messages": "Participant Task Update",
}
_HOME = {name: f"fedhm.{home}" for home, names in _HOMES.items() for name in names.split()}


class _Package(ModuleType):
    """The package, in which `run`, `measure` and `export` are functions though modules have these names, too."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value: Any = version("fedhm")
        elif name in _HOME:
            value = getattr(import_module(_HOME[name]), name)
        elif name in ("models", "tracking"):
            value = import_module(f"fedhm.{name}")
        else:
            raise AttributeError(f"module 'fedhm' has no attribute '{name}'")
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Leave out what the import system sets beside a public name: the module in which it lives."""
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__, "__version__"})


sys.modules[__name__].__class__ = _Package

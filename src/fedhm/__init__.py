"""Federated learning for devices that are not alike.

One global model; every client trains the largest low-rank version of it that it can afford; the server recovers
each version to full shape, averages, and factorizes again. The way data goes:

    data → federation (one set of samples per client)
    method.tasks(state, participants, round) → engine.run(tasks) → work.run on the client → update
         → admission → method.merge(state, updates, round) → server optimizer → state
         → evaluate each tier by the objective → record → checkpoint · progress · report

`experiment.py` holds that loop, `assembly.py` puts its parts together, `methods/` has a file for each method and
`lowrank/` the mathematics. `run` trains a model of your own on data of your own; `resume` finishes a run that a config
names. To bring a method, subclass `MethodConfig` for its settings and `Method` for what runs; an `Objective` says what
is learned and by which metrics it is told; a `Watcher` is told how a run goes.
"""

from importlib.metadata import version

from fedhm import models
from fedhm.assembly import assemble
from fedhm.config.method_config import MethodConfig
from fedhm.config.objective import Metric, Metrics, Objective
from fedhm.config.reading import load_config
from fedhm.config.settings import Config
from fedhm.data.batches import Preprocessing
from fedhm.data.federation import Federation
from fedhm.data.samples import Samples
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment, Result
from fedhm.lowrank.hybrid import to_full, to_hybrid
from fedhm.lowrank.layers import LowRankConv2d, LowRankLinear
from fedhm.lowrank.plan import RankPlan, plan_ranks
from fedhm.measure.cost import Cost, measure, training_memory
from fedhm.methods.method import Method, ModelState, State
from fedhm.run import prepare, resume, run
from fedhm.runs.tier_files import load_tier
from fedhm.server.record import Record, Watcher
from fedhm.work.messages import Participant, Task, Update

__version__ = version("fedhm")

__all__ = [
    "Config", "Cost", "Experiment", "Federation", "FedhmError", "LowRankConv2d", "LowRankLinear", "Method",
    "MethodConfig", "Metric", "Metrics", "ModelState", "Objective", "Participant", "Preprocessing", "RankPlan",
    "Record", "Result", "Samples", "State", "Task", "Update", "Watcher", "assemble", "load_config", "load_tier",
    "measure", "models", "plan_ranks", "prepare", "resume", "run", "to_full", "to_hybrid", "training_memory",
]  # fmt: skip

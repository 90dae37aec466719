"""Federated learning for devices that are not alike.

One global model; every client trains the largest low-rank version of it that it can afford; the server recovers
each version to full shape, averages, and factorizes again. The way data goes:

    data → federation (one set of samples per client)
    method.tasks(state, participants) → engine.run(tasks) → client.run(task) → update
         → admission → method.merge(state, updates) → state
         → evaluate each tier → record → checkpoint · progress · report

`experiment.py` holds that loop, `methods/fedhm.py` the method, `lowrank/` the mathematics.
"""

from importlib.metadata import version

from fedhm import models
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
from fedhm.run import prepare, run
from fedhm.runs.tier_files import load_tier

__version__ = version("fedhm")

__all__ = [
    "Config", "Cost", "Experiment", "Federation", "FedhmError", "LowRankConv2d", "LowRankLinear", "RankPlan",
    "Preprocessing", "Result", "Samples", "load_config", "load_tier", "measure", "models", "plan_ranks", "prepare",
    "run", "to_full", "to_hybrid", "training_memory",
]  # fmt: skip

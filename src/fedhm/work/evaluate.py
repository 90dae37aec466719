"""Evaluate the network on the client's test samples, and send the sums from which the objective's metrics follow.

The sums of several clients add up to the sums over their joint samples, so pooled metrics are exact.
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import reduce
from operator import add
from warnings import warn

import torch
from torch import Tensor, nn

from fedhm.config.objective import Metrics, Objective
from fedhm.config.schema import Config, TrainConfig
from fedhm.data.samples import Feed
from fedhm.errors import FedhmWarning
from fedhm.machine.device import CPU, move_tensors
from fedhm.machine.memory import EVALUATION_ADVICE, memory_errors
from fedhm.networks.batchnorm import normalise_by_batch
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import forward_batch
from fedhm.networks.reuse import PreparedNetwork, on_device
from fedhm.work.client import Client
from fedhm.work.messages import Task, Update
from fedhm.work.train import inference_batch
from fedhm.work.work import LARGEST_MEAN, Example, Expected, WorkResult, validate_bounds

EVALUATE = "evaluate"
OF_ONE_SAMPLE = -(LARGEST_MEAN**2), LARGEST_MEAN**2  # bounds on what a sample adds to a sum, if the objective has none


class Evaluate:
    trains = returns_network = False
    tests = True
    past, short = "evaluated", "eval"

    def loaded(self, task: Task) -> Tensors:
        return task.tensors

    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        batch = inference_batch(task.options.batch, client.train, task)
        by_batch = task.options.test_batch_statistics
        return WorkResult(
            sums_over(ready.network, client.test_feed, batch, client.objective, test_batch_statistics=by_batch)
        )

    @torch.no_grad()
    def expected(self, network: nn.Module, example: Example) -> Tensors:
        found = example.objective.sums(forward_batch(network.eval(), example.inputs), example.targets)
        return {name: value.double() for name, value in found.items()}

    def validate(self, update: Update, task: Task, expected: Expected) -> str | None:
        assert expected.objective is not None
        for name, tensor in update.tensors.items():
            lowest, highest = (update.samples * bound for bound in expected.objective.sum_bound(name) or OF_ONE_SAMPLE)
            # A network may give NaN for some samples. That is allowed here, and judged together with other clients.
            if reason := validate_bounds(name, tensor[tensor.isfinite()], lowest, highest):
                return reason
        try:
            expected.objective.results(update.tensors, update.samples)
        except Exception as error:  # an objective may raise anything for impossible sums
            return f"no metrics follow from its sums ({error!r})"
        return None

    def samples_seen(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        return samples


def evaluate(
    network: nn.Module, feed: Feed, batch: int, objective: Objective, *, test_batch_statistics: bool = False
) -> Metrics:
    """Return the objective's metrics over all samples of the feed."""
    placed = on_device(network, feed.device)
    sums = sums_over(placed, feed, batch, objective, test_batch_statistics=test_batch_statistics)
    return objective.results(sums, len(feed.samples))


@memory_errors("to evaluate the tiers", EVALUATION_ADVICE)
def evaluate_tiers(networks: Mapping[str, nn.Module], feed: Feed, config: Config) -> dict[str, Metrics]:
    """Return the metrics of every tier's network."""
    batch, objective = config.evaluation.batch, config.objective
    by_batch = config.evaluation.statistics == "test-batch"
    return {
        tier: evaluate(network, feed, batch, objective, test_batch_statistics=by_batch)
        for tier, network in networks.items()
    }


def no_numbers(metrics: Metrics) -> bool:
    """Tell whether some metric is NaN or infinite."""
    return not all(map(math.isfinite, metrics.values()))


def warn_of(after: int, tier: str, samples: str) -> None:
    """Warn that a model gives NaN or infinite values for some samples after a round."""
    warn(
        f"after round {after} the model of tier {tier} gives NaN or infinite values for {samples}, so that some of its "
        "metrics are no numbers: lower train.lr, or resume from an earlier round with 'fedhm resume DIR --from ROUND'",
        FedhmWarning,
        stacklevel=3,
    )


@torch.no_grad()
def sums_over(
    network: nn.Module, feed: Feed, batch: int, objective: Objective, *, test_batch_statistics: bool = False
) -> Tensors:
    """Return the objective's sums over all samples of the feed. The network must be on the feed's device.

    test_batch_statistics  BatchNorm layers normalise by each batch's own mean and variance, and store neither
    """
    network.eval()
    found: dict[str, list[Tensor]] = {}  # by batch; summed at the end, so that no batch waits for its result
    with normalise_by_batch(network) if test_batch_statistics else nullcontext():
        for inputs, targets in feed.ordered(batch):
            for name, value in objective.sums(forward_batch(network, inputs), targets).items():
                found.setdefault(name, []).append(value)
    by_batch = {name: torch.stack(values) for name, values in found.items()}
    if feed.device != CPU:
        by_batch = move_tensors(by_batch, CPU)
    return {name: reduce(add, values.double()) for name, values in by_batch.items()}


ENTRY_POINT = Evaluate()

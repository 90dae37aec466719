"""The loop around a training graph: load weights, make steps, take the trained tensors out.

The graph computes the loss with its Frobenius decay, and the gradients. This loop does the rest, in this order: it
clips the whole gradient, makes a step of ExecuTorch's SGD with weight decay and momentum, and moves the running
averages of BatchNorm. `examples/phone_client.py` is the same loop without the library.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.config.schema import TrainConfig
from fedhm.lowrank.layers import LowRank
from fedhm.networks.exchange import Tensors
from fedhm.ondevice.executorch import LoadedGraph, make_optimizer
from fedhm.ondevice.graph import PREFIX, TrainingGraph


class GraphLoop:
    """A training graph in the runtime, with the running averages beside it."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph, self._loaded = graph, LoadedGraph(graph.program)
        self._averages: Tensors = {}
        self._optimizers: list[tuple[list[str], Any]] = []
        self._limit = 0.0
        # the runtime tells where its parameters are after a step only
        self._loaded.step([torch.zeros(shape, dtype=dtype) + (dtype == torch.float32) for shape, dtype in graph.inputs])
        self._parameters = {n.removeprefix(PREFIX): t for n, t in self._loaded.parameters.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights and running averages of a task."""
        for name, own in self._parameters.items():
            own.copy_(tensors[name])
        names = [name for each in self.graph.statistics for name in (each.mean, each.variance)]
        self._averages = {name: tensors[name].clone() for name in names}

    def start(self, lr: float, train: TrainConfig, decays: Mapping[str, float]) -> None:
        """Begin the steps of a round: new optimizers, without momentum so far.

        decays  the weight decay of each parameter
        """
        self._limit = train.gradient_limit
        self._optimizers = []
        for decay in sorted(set(decays.values())):
            names = [name for name in self._parameters if decays[name] == decay]
            own = {name: self._parameters[name] for name in names}
            self._optimizers.append(
                (names, make_optimizer(own, lr, train.momentum, train.dampening, decay, train.nesterov))
            )

    def gradients(
        self, inputs: Tensor, targets: Tensor, held: Tensor, bases: Sequence[Tensor] = ()
    ) -> tuple[float, Tensors]:
        """Run a batch forward and backward, and move the running averages. Return the loss and all gradients."""
        rows, count = self.graph.rows, len(targets)
        weights = (torch.arange(rows) < count).float()
        places = torch.arange(rows).clamp(max=count - 1)  # rows that are missing repeat the last one, with weight 0
        given = [inputs[places], targets[places], weights, held, *bases]
        _, loss, *statistics = self._loaded.step(given)
        for each, mean, variance in zip(self.graph.statistics, statistics[::2], statistics[1::2], strict=True):
            self._averages[each.mean].lerp_(mean, each.momentum)
            self._averages[each.variance].lerp_(variance, each.momentum)
        return loss.item(), {n.removeprefix(PREFIX): g for n, g in self._loaded.gradients.items()}

    def step(self, gradients: Tensors) -> None:
        """Clip the whole gradient, and make a step."""
        if self._limit:
            norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values()))
            for each in gradients.values():
                each.mul_(min(1.0, self._limit / (norm + 1e-6)))
        for names, optimizer in self._optimizers:
            optimizer.step({name: gradients[name] for name in names})

    def tensors(self) -> Tensors:
        """Return the parameters and running averages, as they are now."""
        return {name: own.clone() for name, own in self._parameters.items()} | {
            name: average.clone() for name, average in self._averages.items()
        }

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the `evaluate` method for a batch, with the present tensors."""
        count = len(inputs)
        rows = inputs[torch.arange(self.graph.rows).clamp(max=count - 1)]
        own = self.tensors()
        return self._loaded.evaluate([own[name] for name in self.graph.tensors], rows)[:count]


def weight_decays(network: nn.Module, train: TrainConfig) -> dict[str, float]:
    """Return the weight decay of each parameter. Frobenius decay, which is in the graph, replaces it on factors."""
    factors = {id(p) for m in network.modules() if isinstance(m, LowRank) for p in (m.u, m.v)}
    spared = set() if train.decay_factors or not train.frobenius_decay else factors
    return {name: 0.0 if id(p) in spared else train.weight_decay for name, p in network.named_parameters()}


def held_labels(labels: tuple[int, ...] | None, outputs: int) -> Tensor:
    """Return the graph's mask of labels: 1 for those that count; all of them if the loss is not masked."""
    if labels is None:
        return torch.ones(outputs)
    held = torch.zeros(outputs)
    held[list(labels)] = 1.0
    return held

"""Train the network and, with the same batches, a smaller tier inside it; send the network back.

The smaller tier is the smallest one, or one drawn at random for every batch. With w = `train.nested`,

    sum       the loss is own + w · inside, both on this batch: steps are up to 1 + w times as long as without
    beside    the loss is (own + w · inside) / (1 + w): steps are no longer than without
    instead   with probability w the batch trains the smaller tier alone, at no extra cost

Clients of larger tiers learn more with longer steps. Networks without normalisation layers may diverge with them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from fedhm.lowrank.hybrid import nested_tiers
from fedhm.machine.device import CPU, move_tensors
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import Inputs, forward_batch
from fedhm.networks.precision import MixedPrecision
from fedhm.networks.reuse import PreparedNetwork
from fedhm.networks.saving import Loss
from fedhm.networks.structure import has_normalisation
from fedhm.seeds import numpy_generator
from fedhm.work.client import Client
from fedhm.work.measures import measures_for
from fedhm.work.messages import Task
from fedhm.work.train import fit, task_seed
from fedhm.work.work import TrainingWork, WorkResult

BASIS = "basis "  # prefix of a layer's name: its leading directions, which come with a task and are not sent back


class Nested(TrainingWork):
    def loaded(self, task: Task) -> Tensors:
        return {name: tensor for name, tensor in task.tensors.items() if not name.startswith(BASIS)}

    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        train, labels, network = client.train, client.loss_labels, ready.network
        inside, device = nested_tiers(network), client.networks.device
        form = ("sum" if has_normalisation(network) else "beside") if train.nested_form == "auto" else train.nested_form
        bases = {n.removeprefix(BASIS): t for n, t in task.tensors.items() if n.startswith(BASIS)}
        bases = bases if device == CPU else move_tensors(bases, device)
        draw = numpy_generator(client.seed, "nested", task.round, task.client, str(task.network))

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return client.objective.loss(logits, targets, labels)

        def beside(precision: MixedPrecision) -> Loss:
            own_forward, smaller = precision.forward(ready.forward), precision.forward(draw_tier())  # for all parts
            parts = 1 if form == "sum" else 1 + train.nested

            def loss(inputs: Inputs, targets: Tensor) -> Tensor:
                own = loss_of(forward_batch(own_forward, inputs), targets) / parts
                precision.backward(own)  # now, so that the activations of only one network are in memory
                return own.detach() + loss_of(forward_batch(smaller, inputs), targets) * train.nested / parts

            return loss

        def instead(precision: MixedPrecision) -> Loss:
            forward = precision.forward(draw_tier() if draw.random() < train.nested else ready.forward)
            return lambda inputs, targets: loss_of(forward_batch(forward, inputs), targets)

        def draw_tier() -> Callable[..., Any]:
            number = int(draw.integers(len(inside.networks)))
            return partial(inside.forward, number, network, bases)

        measures = measures_for(task, network)
        with task_seed(client, task):
            mean = fit(client, task, ready, labels, instead if form == "instead" else beside, measures)
        measured = measures.result() if measures else None  # before the tensors are handed over
        return WorkResult(ready.hand_over(self.loaded(task)), mean, labels, measured=measured)


ENTRY_POINT = Nested()

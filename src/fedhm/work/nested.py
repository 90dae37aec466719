"""Train the network and, with the same batches, one of the smaller tiers inside it; send the network back.

For every batch one of the smaller tiers is drawn at random. With w = `train.nested`,

    beside    the loss is (own + w · inside) / (1 + w), both on this batch: steps are no longer than without
    instead   with probability w the batch trains the smaller tier alone, which costs nothing more
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from fedhm.config.training import TrainConfig
from fedhm.lowrank.nested import inside_of
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import Inputs, scores
from fedhm.networks.parts import Loss
from fedhm.seeds import numpy_generator
from fedhm.work.bounds import Expected, change
from fedhm.work.client import Client
from fedhm.work.messages import Task, Update
from fedhm.work.reuse import Ready
from fedhm.work.train import fit, task_seed
from fedhm.work.work import Answer, Example

BASIS = "basis "  # before a layer: its leading directions, which come with a task and are not sent back


class Nested:
    trains = returns_network = True
    tests = False
    past, short = "trained", "train"

    def loaded(self, task: Task) -> Tensors:
        return {name: tensor for name, tensor in task.tensors.items() if not name.startswith(BASIS)}

    def run(self, client: Client, task: Task, ready: Ready) -> Answer:
        train, held, network = client.train, client.held, ready.network
        inside, device = inside_of(network), client.networks.device
        bases = {n.removeprefix(BASIS): t.to(device) for n, t in task.tensors.items() if n.startswith(BASIS)}
        draw = numpy_generator(client.seed, "nested", task.round, task.client, task.network)

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return client.objective.loss(logits, targets, held)

        def beside() -> Loss:
            smaller = drawn()  # one for all parts of a batch

            def loss(inputs: Inputs, targets: Tensor) -> Tensor:
                own = loss_of(scores(ready.forward, inputs), targets) / (1 + train.nested)
                own.backward()  # at once, so that one network's activations are in memory at a time
                return own.detach() + loss_of(scores(smaller, inputs), targets) * train.nested / (1 + train.nested)

            return loss

        def instead() -> Loss:
            forward = drawn() if draw.random() < train.nested else ready.forward
            return lambda inputs, targets: loss_of(scores(forward, inputs), targets)

        def drawn() -> Callable[..., Any]:
            number = int(draw.integers(len(inside.networks)))
            return partial(inside.forward, number, network, bases)

        with task_seed(client, task):
            mean = fit(client, task, ready, held, beside if train.nested_form == "beside" else instead)
        return Answer(ready.hand_over(self.loaded(task)), mean, held)

    def blank(self, network: nn.Module, example: Example) -> Tensors:
        raise AssertionError("an answer has the tensors that the network was loaded with")

    def objection(self, update: Update, task: Task, expected: Expected) -> str | None:
        return change(update.tensors, self.loaded(task), expected)

    def passes(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        return samples * train.epochs  # of a network whose costs are those of all that runs for a batch


ENTRY_POINT = Nested()

"""Train the network and, with the same batches, a smaller tier inside it; send the network back.

The smaller tier is the smallest one, or one drawn at random for every batch. With w = `train.nested`,

    sum       the loss is own + w · inside, both on this batch: steps are up to 1 + w times as long as without
    beside    the loss is (own + w · inside) / (1 + w): steps are no longer than without
    instead   with probability w the batch trains the smaller tier alone, at no extra cost

Both networks begin with the same layers, which run once for both (`networks/common_prefix.py`).

Clients of larger tiers learn more with longer steps. Networks without normalisation layers may diverge with them.
"""

from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from fedhm.config.schema import TrainConfig
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import nested_tiers
from fedhm.lowrank.layers import module_of
from fedhm.machine.device import CPU, move_tensors
from fedhm.networks.common_prefix import CommonPrefix
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import Inputs, forward_batch
from fedhm.networks.precision import MixedPrecision
from fedhm.networks.reuse import PreparedNetwork
from fedhm.networks.saving import Loss
from fedhm.networks.structure import has_normalisation
from fedhm.ondevice.nesting import Nesting
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
        form = _form(network, train)
        bases = {n.removeprefix(BASIS): t for n, t in task.tensors.items() if n.startswith(BASIS)}
        bases = bases if device == CPU else move_tensors(bases, device)
        shares = may_share(client.train, task, ready)
        draw = numpy_generator(client.seed, "nested", task.round, task.client, str(task.network))

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return client.objective.loss(logits, targets, labels)

        def beside(precision: MixedPrecision) -> Loss:
            number = draw_tier()
            parts = 1 if form == "sum" else 1 + train.nested

            def loss(inputs: Inputs, targets: Tensor) -> Tensor:
                prefix = CommonPrefix(device)
                own_pass = prefix.first(ready.forward, inside.layers(number, network)) if shares else ready.forward
                own = loss_of(forward_batch(precision.forward(own_pass), inputs), targets) / parts
                cut = prefix.cut(own) if shares else None
                # now, so that the activations of only one network are in memory, and those of the common layers
                precision.backward(own, cut.backward if cut else Tensor.backward)
                smaller = inner_forward(number)
                if cut:
                    smaller = prefix.second(smaller, inside.layers(number))
                inner = loss_of(forward_batch(precision.forward(smaller), inputs), targets) * train.nested / parts
                return own.detach() + (cut.join(inner) if cut else inner)

            return loss

        def instead(precision: MixedPrecision) -> Loss:
            number = draw_tier() if draw.random() < train.nested else None
            forward = precision.forward(ready.forward if number is None else inner_forward(number))
            return lambda inputs, targets: loss_of(forward_batch(forward, inputs), targets)

        def draw_tier() -> int:
            return int(draw.integers(len(inside.networks)))

        def inner_forward(number: int) -> Callable[..., Any]:
            return partial(inside.forward, number, network, bases)

        if client.runtime == "executorch":
            from fedhm.work.runtime import fit_in_runtime

            nesting, own = nesting_of(task, network, train)
            mean = fit_in_runtime(client, task, ready, labels, nesting, tuple(bases[each] for each in nesting.bases))
            return WorkResult(ready.hand_over(own), mean, labels)
        measures = measures_for(task, network)
        with task_seed(client, task):
            mean = fit(client, task, ready, labels, instead if form == "instead" else beside, measures)
        measured = measures.result() if measures else None  # before the tensors are handed over
        return WorkResult(ready.hand_over(self.loaded(task)), mean, labels, measured=measured)


WORTHWHILE = 2  # common layers: with the first convolution alone, recording takes longer than running it again


def may_share(train: TrainConfig, task: Task, ready: PreparedNetwork) -> bool:
    """Tell whether both networks may share what they have in common.

    Compiled networks run as a whole. And a task that saves memory has to keep to what was predicted for it: the
    results of common layers stay in memory until both networks have used them.
    """
    saves = train.micro_batch or train.checkpointing or task.options.micro_batch is not None
    return ready.forward is ready.network and not saves and _common_layers(ready.network) >= WORTHWHILE


def _common_layers(network: nn.Module) -> int:
    """Return how many layers with matrices are listed before the first that is smaller inside."""
    smaller = {module_of(name) for plan in nested_tiers(network).plans for name in plan}
    before = takewhile(lambda named: named[0] not in smaller, network.named_modules())
    return sum(any(weight.ndim > 1 for weight in layer.parameters(recurse=False)) for _, layer in before)


def nesting_of(task: Task, network: nn.Module, train: TrainConfig) -> tuple[Nesting, Tensors]:
    """Return how a training graph nests the smaller tier of a task, and the tensors of the network itself."""
    form, inside = _form(network, train), nested_tiers(network)
    if form == "instead" or len(inside.networks) > 1:
        setting = "train.nested_form" if form == "instead" else "train.nested_tier"
        value = "'auto'" if form == "instead" else "'smallest'"
        raise FedhmError(f"a training graph is the same for every batch: set {setting} = {value}")
    bases = {n.removeprefix(BASIS): tuple(t.shape) for n, t in task.tensors.items() if n.startswith(BASIS)}
    parts = 1.0 if form == "sum" else 1 + train.nested
    return Nesting(inside, train.nested, parts, bases), ENTRY_POINT.loaded(task)


def _form(network: nn.Module, train: TrainConfig) -> str:
    if train.nested_form != "auto":
        return train.nested_form
    return "sum" if has_normalisation(network) else "beside"


ENTRY_POINT = Nested()

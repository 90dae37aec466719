"""The check of every training graph: steps in the runtime, and each gradient compared with PyTorch's."""

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedhm.config.objective import Objective
from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.lowrank.decay import add_frobenius_decay, low_rank_layers
from fedhm.machine.printable import printable
from fedhm.networks.exchange import Tensors, held_tensors, load_unpacked
from fedhm.networks.structure import copy_network
from fedhm.ondevice.graph import Example, TrainingGraph
from fedhm.ondevice.loop import GraphLoop, held_labels, weight_decays
from fedhm.ondevice.nesting import Nesting

TOLERANCE = 1e-3  # of the largest gradient: rounding is below 1e-5 of it, and a wrong operator above 1e-2
SMALL = 1e-2  # gradients below this share of the largest are compared with that share: some are 0 but for rounding
ROUNDINGS = 10  # times as much rounding as PyTorch's own is still rounding
ATTEMPTS = 3  # with other weights each: only a wrong operator differs in all of them
LR = 0.01  # of the steps in between, so that the weights are not those of the file


class DifferenceError(FedhmError):
    """The runtime computes something else than PyTorch."""


@dataclass(frozen=True)
class GraphCheck:
    """How far the runtime was from PyTorch, relative to the largest gradient, statistic or output."""

    gradients: float
    statistics: float
    outputs: float
    steps: int


def check_graph(
    network: nn.Module,
    objective: Objective,
    train: TrainConfig,
    graph: TrainingGraph,
    example: Example,
    nesting: Nesting | None = None,
) -> GraphCheck:
    """Make steps in the runtime on the samples of `example`. Refuse a graph that differs from PyTorch anywhere.

    A value of a deep network may lie so near the kink of its ReLU that rounding decides whether a gradient passes. So a
    graph that differs is checked again, with other weights.
    """
    try:
        loop = GraphLoop(graph)
    except Exception as error:  # whatever a runtime raises
        raise FedhmError(
            f"ExecuTorch cannot run the training graph: {_failed(graph) or printable(str(error))}"
        ) from error
    for attempt in range(ATTEMPTS):
        try:
            return _compare_steps(loop, network, objective, train, graph, example, nesting, attempt)
        except DifferenceError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _compare_steps(
    loop: GraphLoop,
    network: nn.Module,
    objective: Objective,
    train: TrainConfig,
    graph: TrainingGraph,
    example: Example,
    nesting: Nesting | None,
    seed: int,
) -> GraphCheck:
    own = copy_network(network).train()
    own.load_state_dict(network.state_dict())
    generator = torch.Generator().manual_seed(seed)
    _leave_kinks(own, generator)
    bases = [torch.randn(shape, generator=generator) for shape in (nesting.bases.values() if nesting else ())]
    bases = [torch.linalg.qr(each)[0] for each in bases]
    worst = moved = 0.0
    loop.load(held_tensors(own))
    loop.start(LR, train.model_copy(update={"clip_norm": 0.0}), weight_decays(own, train))
    batches = _batches(example, train.batch)
    for inputs, targets in batches:
        labels = objective.held(targets) if train.masked_loss and objective.has_labels else None
        before = loop.tensors()
        loss, gradients = loop.gradients(inputs, targets, held_labels(labels, example.outputs), bases)
        expected = _reference(own, before, objective, train, inputs, targets, labels, example, nesting, bases)
        exact = partial(
            _reference,
            copy_network(own).double(),
            {name: tensor.double() for name, tensor in before.items()},
            objective, train, inputs, targets, labels, example, nesting, [each.double() for each in bases],
        )  # fmt: skip
        worst = max(worst, _compare(gradients, expected, graph, exact))
        averages = {n: t for n, t in loop.tensors().items() if n not in graph.parameters}
        moved = max(moved, _compare(averages, held_tensors(own), graph))
        loop.step(gradients)
        if loss != loss:
            raise FedhmError("the training graph gives NaN for a loss: nothing was written")
    own.eval()
    load_unpacked(own, loop.tensors())
    with torch.no_grad():
        inputs = batches[0][0]
        expected_outputs = own(_normalised(inputs, example.preprocessing))
        apart = (loop.outputs(inputs) - expected_outputs).abs().max() / expected_outputs.abs().max().clamp(min=1e-6)
    if not apart <= TOLERANCE:
        raise DifferenceError(f"ExecuTorch gives other outputs than the network, by {apart:.2g} of the largest")
    return GraphCheck(worst, moved, float(apart), len(batches))


@torch.no_grad()
def _leave_kinks(network: nn.Module, generator: torch.Generator) -> None:
    """Move the weights a little. New biases are 0, so a constant channel would lie in the kink of its ReLU.

    There, rounding alone decides whether a gradient passes, in PyTorch as well as in the runtime.
    """
    for parameter in network.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * 0.05 * (parameter.abs().mean() + 0.1))


def _failed(graph: TrainingGraph) -> str:
    """Return which operator failed, and a layer that has it. The runtime tells it on the standard error only."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            GraphLoop(graph)
        except RuntimeError:
            pass
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        found = re.search(r"in operator aten::(\w+)", file.read().decode("utf-8", "replace"))
    if not found:
        return ""
    stem = found[1].removesuffix("_backward").removesuffix("olution")  # convolution: conv1d, conv2d
    layers = [layer for operator, layer in graph.layers.items() if operator.startswith(stem)]
    return f"its operator '{found[1]}' fails" + (f", of {layers[0]}" if layers else "")


def _reference(
    own: nn.Module,
    weights: Tensors,
    objective: Objective,
    train: TrainConfig,
    inputs: Tensor,
    targets: Tensor,
    labels: tuple[int, ...] | None,
    example: Example,
    nesting: Nesting | None,
    bases: Sequence[Tensor],
) -> Tensors:
    """Return PyTorch's gradients at the weights of the runtime."""
    load_unpacked(own, weights)
    own.zero_grad()
    x = _normalised(inputs, example.preprocessing).to(next(iter(weights.values())).dtype)
    loss = objective.loss(own(x), targets.to(x.dtype) if targets.is_floating_point() else targets, labels)
    if nesting:
        named = dict(zip(nesting.bases, bases, strict=True))
        wide = targets.to(x.dtype) if targets.is_floating_point() else targets
        smaller = objective.loss(nesting.inside.forward(0, own, named, x), wide, labels)
        loss = (loss + smaller * nesting.weight) / nesting.parts
    loss.backward()
    add_frobenius_decay(low_rank_layers(own) if train.frobenius_decay else [], train.frobenius_decay)
    return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def _compare(
    found: Tensors, expected: Tensors, graph: TrainingGraph, exact: Callable[[], Tensors] | None = None
) -> float:
    """Return the largest difference; refuse one that is no rounding, by the last layer that differs.

    A batch of few samples may be so badly conditioned that PyTorch itself rounds more than the tolerance. Then `exact`,
    its gradients in float64, say how much rounding there is.

    A wrong operator spoils the gradients of all layers before it. So it stands right behind the last of them.
    """
    largest = max((float(t.abs().max()) for name, t in expected.items() if name in found), default=0.0) or 1.0
    worst, last = 0.0, ""
    wide: Tensors | None = None
    for name, tensor in found.items():
        scale = max(float(expected[name].abs().max()), SMALL * largest)
        apart = float((tensor - expected[name]).abs().max()) / scale
        is_rounding = apart <= TOLERANCE
        if not is_rounding and exact is not None:
            wide = exact() if wide is None else wide
            is_rounding = apart <= ROUNDINGS * float((wide[name] - expected[name]).abs().max()) / scale
        if not is_rounding:
            last = name
            worst = max(worst, apart) if apart == apart else float("inf")
        elif not last:
            worst = max(worst, apart)
    if last:
        raise DifferenceError(
            f"ExecuTorch computes another gradient than PyTorch for '{last}', by {worst:.2g} of the largest: "
            f"{graph.uses.get(last, 'its layer')} cannot be trained by it"
        )
    return worst


def _batches(example: Example, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return a whole batch, the largest there is, and a smaller one."""
    order = torch.randperm(len(example.targets), generator=torch.Generator().manual_seed(0))
    sizes = (batch, batch + 1, max(2, batch // 2))
    found = []
    for number, size in enumerate(sizes):
        places = order.roll(-number * batch)[torch.arange(size) % len(order)]
        found.append((example.inputs[places], example.targets[places]))
    return found


def _normalised(inputs: Tensor, preprocessing: Preprocessing | None) -> Tensor:
    if preprocessing is None:
        return inputs
    return preprocessing.normalise(inputs.permute(0, 2, 3, 1).contiguous())

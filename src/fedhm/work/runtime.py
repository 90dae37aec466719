"""The local steps of a round in ExecuTorch's runtime instead of PyTorch (`engine.client = "executorch"`).

Only the steps are replaced: batches, the learning rate, the answer and the noise on it are those of every client. A
network's graph is built and checked at its first task, on samples of that client, and then kept in this process.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.machine.device import CPU
from fedhm.networks.exchange import held_tensors, load_unpacked
from fedhm.networks.inputs import require_tensor
from fedhm.networks.reuse import PreparedNetwork
from fedhm.networks.saving import count_batches
from fedhm.ondevice.check import check_graph
from fedhm.ondevice.graph import Example, build_graph
from fedhm.ondevice.loop import GraphLoop, held_labels, weight_decays
from fedhm.ondevice.nesting import Nesting
from fedhm.ondevice.settings import check_train_settings
from fedhm.seeds import torch_generator
from fedhm.work.client import Client
from fedhm.work.messages import Task
from fedhm.work.work import steps_in_round

WHY = "engine.client = 'executorch'"
CHECKED = 512  # samples at most on which a graph is checked


def fit_in_runtime(
    client: Client,
    task: Task,
    ready: PreparedNetwork,
    labels: tuple[int, ...] | None,
    nesting: Nesting | None = None,
    bases: tuple[Tensor, ...] = (),
) -> float:
    """Make the local steps of one round in the runtime; the network gets the trained tensors. Return the mean loss."""
    train, feed = client.train, client.feed
    if client.networks.device != CPU:
        raise FedhmError(f"{WHY} computes on the processor: set engine.device = 'cpu'")
    if task.options.measure:
        raise FedhmError(f"{WHY} measures no steps: leave evaluation.diagnostics = 'theory' out")
    if task.options.micro_batch is not None:
        raise FedhmError(f"{WHY} has a fixed batch, so a budget of memory cannot split it: use ratios as tiers")
    check_train_settings(train, WHY)
    loop, outputs = _loop(client, task, ready, nesting)
    loop.load(held_tensors(ready.network))
    loop.start(train.learning_rate(task.round), train, weight_decays(ready.network, train))
    held = held_labels(labels, outputs)
    generator = torch_generator(client.seed, "batches", task.round, task.client, str(task.network))
    steps = steps_in_round(train, len(client.samples))
    last_epoch = steps - count_batches(len(client.samples), train.batch)
    total, seen = 0.0, 0
    for step, (inputs, targets) in enumerate(feed.shuffled(train.batch, generator, steps)):
        loss, gradients = loop.gradients(require_tensor(inputs, WHY), targets, held, bases)
        loop.step(gradients)
        if step >= last_epoch:
            total, seen = total + loss * len(targets), seen + len(targets)
    load_unpacked(ready.network, loop.tensors())
    return total / seen


def _loop(client: Client, task: Task, ready: PreparedNetwork, nesting: Nesting | None) -> tuple[GraphLoop, int]:
    """Return the graph of a task's network in the runtime, and the length of its mask of labels."""
    key: Hashable = (task.network, task.kind)
    kept = client.networks.graphs
    if key not in kept:
        example = _example(client, ready)
        given = (ready.network, client.objective, client.train)
        graph = build_graph(*given, example, nesting)
        check_graph(*given, graph, example, nesting)
        kept[key] = (GraphLoop(graph), example.outputs)
    loop, outputs = kept[key]
    assert isinstance(loop, GraphLoop)
    return loop, outputs


@torch.no_grad()
def _example(client: Client, ready: PreparedNetwork) -> Example:
    batch, targets = next(client.feed.ordered(CHECKED))
    inputs = require_tensor(batch, WHY).contiguous()
    outputs = 1
    if client.objective.has_labels:
        training = ready.network.training
        outputs = int(ready.network.eval()(inputs[:2]).shape[-1])
        ready.network.train(training)
    return Example(inputs, targets, outputs)

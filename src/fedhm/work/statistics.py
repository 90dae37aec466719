"""Gather BatchNorm statistics: run the network over the client's samples, and send the statistics of its layers.

A client runs the model over its samples, without gradients and normalising by batch. For every BatchNorm layer it sends
how many values each channel saw, their mean and their variance. The statistics of several clients pool exactly to those
of their joint data:

    N = Σ nᵢ    M = Σ nᵢ mᵢ / N    V = Σ nᵢ (vᵢ + (mᵢ − M)²) / N
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhm.config.schema import TrainConfig
from fedhm.machine.device import CPU, move_tensors
from fedhm.networks.batchnorm import tracked_layers
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import Inputs, forward_batch, repeat_batch
from fedhm.networks.reuse import PreparedNetwork
from fedhm.work.client import Client
from fedhm.work.messages import Task, Update
from fedhm.work.train import inference_batch
from fedhm.work.work import Example, Expected, WorkResult, moment_bounds, validate_bounds

STATISTICS = "statistics"


class Statistics:
    trains = returns_network = tests = False
    past, short = "gathered statistics", "BN"

    def loaded(self, task: Task) -> Tensors:
        return task.tensors

    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        # Nothing is stored for a backward pass. So four times the batch fits, unless training saves memory.
        batches = client.feed.ordered(inference_batch(4 * client.train.batch, client.train, task))
        return WorkResult(gather(ready.network, (inputs for inputs, _ in batches)))

    def expected(self, network: nn.Module, example: Example) -> Tensors:
        """Return zero means and variances, and how many values each channel sees of one sample.

        A layer that never runs gives nothing.
        """
        two = repeat_batch(example.inputs, 2)  # one sample alone may have no variance
        gathered = gather(network, [two])
        return {name: t / 2 if name.endswith("/values") else torch.zeros_like(t) for name, t in gathered.items()}

    def validate(self, update: Update, task: Task, expected: Expected) -> str | None:
        for name, tensor in update.tensors.items():
            part = name.rpartition("/")[2]
            if part == "values":  # at least two samples: some values do not depend on the batch
                lowest, highest = 1.0, expected.tensors[name].item() * max(2, update.samples)
            else:
                lowest, highest = moment_bounds(part == "variance")
            if reason := validate_bounds(name, tensor, lowest, highest):
                return reason
        return None

    def samples_seen(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        return samples


class ChannelMoments(NamedTuple):
    values: Tensor  # (): how many each channel saw
    mean: Tensor  # (channels,)
    variance: Tensor  # (channels,), of the population

    def pooled(self, other: "ChannelMoments") -> "ChannelMoments":
        count = self.values + other.values
        share = other.values / count
        shift = other.mean - self.mean
        variance = self.variance + share * (other.variance - self.variance) + share * (1 - share) * shift**2
        return ChannelMoments(count, self.mean + share * shift, variance)


@torch.no_grad()
def gather(network: nn.Module, inputs: Iterable[Inputs]) -> Tensors:
    """Return the input statistics of every BatchNorm layer over all batches, as tensors to send.

    With momentum 1 a layer's running statistics are those of its last batch, which it computes anyway.
    """
    found: dict[str, list[tuple[float, Tensor, Tensor]]] = {}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def hook(layer: _BatchNorm, arguments: tuple[Tensor, ...], _: Tensor) -> None:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            values = arguments[0].numel() / arguments[0].shape[1]
            found.setdefault(name, []).append((values, layer.running_mean.clone(), layer.running_var.clone()))

        return layers[name].register_forward_hook(hook)

    network.eval()  # as in the evaluation: only BatchNorm layers look at the batch
    layers = tracked_layers(network)
    handles = [watch(name) for name in layers]
    momenta = {name: layer.momentum for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.train()
            layer.momentum = 1.0
        for batch in inputs:
            forward_batch(network, batch)
    finally:
        for name, layer in layers.items():
            layer.momentum = momenta[name]
        for handle in handles:
            handle.remove()
    stacked = {f"{name}/{part}": torch.stack(t) for name, b in found.items() for part, t in _by_part(b).items()}
    if any(tensor.device != CPU for tensor in stacked.values()):
        stacked = move_tensors(stacked, CPU)  # those of all layers together
    joined = {
        name: _joined([count for count, _, _ in batches], stacked[f"{name}/mean"], stacked[f"{name}/variance"])
        for name, batches in found.items()
    }
    return {f"{name}/{part}": t for name, m in joined.items() for part, t in m._asdict().items()}


def _by_part(batches: Sequence[tuple[float, Tensor, Tensor]]) -> dict[str, list[Tensor]]:
    return {"mean": [mean for _, mean, _ in batches], "variance": [variance for _, _, variance in batches]}


def _joined(counts: Sequence[float], means: Tensor, variances: Tensor) -> ChannelMoments:
    """Join the batches of one layer: of each, the number of values, their means and unbiased variances."""
    values = torch.tensor(counts, dtype=torch.float64)[:, None]
    mean = means.double()
    variance = variances.double() * (values - 1) / values  # a layer stores the unbiased estimate
    total = values.sum()
    middle = (values * mean).sum(0) / total
    return ChannelMoments(total, middle, (values * (variance + (mean - middle) ** 2)).sum(0) / total)


def pool(gathered: Iterable[Tensors]) -> Tensors:
    """Merge the clients' statistics into those of their joint data, named as a network stores them."""
    total: dict[str, ChannelMoments] = {}
    for tensors in gathered:
        for name in {key.rpartition("/")[0] for key in tensors}:
            seen = ChannelMoments(*(tensors[f"{name}/{part}"] for part in ChannelMoments._fields))
            total[name] = total[name].pooled(seen) if name in total else seen
    stored: Tensors = {}
    for name, pooled in total.items():
        prefix = f"{name}." if name else ""
        stored[f"{prefix}running_mean"] = pooled.mean
        stored[f"{prefix}running_var"] = pooled.variance
    return stored


ENTRY_POINT = Statistics()

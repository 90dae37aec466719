"""The BatchNorm layers of a network, and the statistics that they store."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def tracked_layers(network: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers whose stored statistics, by which they normalise in evaluation, follow the data."""
    found = {n: m for n, m in network.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}
    return {name: layer for name, layer in found.items() if not vars(layer).get("fedhm_held")}


def running_statistic_names(network: nn.Module) -> set[str]:
    """Return the names under which `network` stores its BatchNorm statistics."""
    layers = tracked_layers(network)
    return {f"{name}.{part}" if name else part for name in layers for part in ("running_mean", "running_var")}


@contextmanager
def normalise_by_batch(network: nn.Module) -> Iterator[None]:
    """Make BatchNorm layers normalise by batch, whatever the network's mode, and leave stored statistics alone."""
    layers = tracked_layers(network).values()
    try:
        for layer in layers:
            layer.train()
            layer.track_running_stats = False
        yield
    finally:
        for layer in layers:
            layer.train(network.training)
            layer.track_running_stats = True


def freeze_statistics(network: nn.Module) -> None:
    """Make BatchNorm layers normalise by stored statistics in training too, whatever mode the network is set to."""
    for layer in tracked_layers(network).values():
        layer.eval()
        vars(layer)["train"] = lambda mode=True, layer=layer: layer  # noqa: ARG005


def hold_statistics(network: nn.Module) -> None:
    """Freeze statistics for good, as a part of a frozen base: they do not travel, and nobody gathers them."""
    freeze_statistics(network)
    for layer in tracked_layers(network).values():
        vars(layer)["fedhm_held"] = True

"""The BatchNorm layers of a network, and their running statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhm.networks.info import info_of


def tracked_layers(network: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers whose running statistics follow the data; those of a frozen base do not."""
    if info_of(network).frozen_base:
        return {}
    return {n: m for n, m in network.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}


def running_statistic_names(network: nn.Module) -> set[str]:
    """Return the names of the running means and variances in the state of `network`."""
    layers = tracked_layers(network)
    return {f"{name}.{part}" if name else part for name in layers for part in ("running_mean", "running_var")}


@contextmanager
def normalise_by_batch(network: nn.Module) -> Iterator[None]:
    """Make BatchNorm layers normalise by batch in any mode, and leave the running statistics unchanged."""
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
    """Make BatchNorm layers normalise by running statistics in training too.

    The layers stay in evaluation mode when the network changes its mode: their `train` method does nothing.
    """
    for layer in tracked_layers(network).values():
        layer.eval()
        vars(layer)["train"] = lambda mode=True, layer=layer: layer  # noqa: ARG005

"""How the weights of a network begin, and how to draw them anew."""

from torch import nn
from torch.nn.modules.conv import _ConvNd


def he_normal(network: nn.Module) -> None:
    """Draw the weights of convolutions from N(0, 2 / (outputs · kernel size)); all else stays as it is.

    Torch's own weights are √6 times smaller, so factors, whose gradients grow with each other, would learn more slowly
    at first.
    """
    for layer in network.modules():
        if isinstance(layer, _ConvNd):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def initialise(network: nn.Module) -> nn.Module:
    """Draw all weights anew, by the rules with which the network was made, and return it.

    A layer's rule is its `reset_parameters`. A network may have one for its layers, which comes after theirs.
    """
    return network.apply(_reset)


def _reset(layer: nn.Module) -> None:
    if callable(reset := getattr(layer, "reset_parameters", None)):
        reset()

"""Federated methods behind one protocol, and the table that names them."""

from collections.abc import Callable

from torch import nn

from fedhm.config import FedAvgConfig, FedHMConfig
from fedhm.methods.fedavg import FedAvg
from fedhm.methods.fedhm import FedHM
from fedhm.methods.method import Method

METHODS: dict[str, Callable[..., Method]] = {"fedhm": FedHM, "fedavg": FedAvg}


def make_method(model: nn.Module, config: FedHMConfig | FedAvgConfig, classifier: str | None = None) -> Method:
    """`classifier` is the layer that gives the logits: rows of labels that a client lacks are not taken from it."""
    return METHODS[config.name](model, config, classifier)

"""Federated methods behind one protocol, and the table that names them."""

from collections.abc import Callable
from typing import Any

from fedhm.methods.fedavg import FedAvg
from fedhm.methods.fedhm import FedHM
from fedhm.methods.method import Method

METHODS: dict[str, Callable[..., Method]] = {"fedhm": FedHM, "fedavg": FedAvg}


def make_method(model: Any, config: Any) -> Method:
    return METHODS[config.name](model, config)

"""Federated methods behind one protocol, and the table that names them."""

from collections.abc import Callable

from torch import nn

from fedhm.config.method import AnyMethodConfig
from fedhm.methods.fedavg import FedAvg
from fedhm.methods.feddf import FedDF
from fedhm.methods.feddlr import FedDLR
from fedhm.methods.fedhm import FedHM
from fedhm.methods.fedmd import FedMD
from fedhm.methods.fedpara import FedPara
from fedhm.methods.fedrolex import FedRolex
from fedhm.methods.fjord import FjORD
from fedhm.methods.heterofl import HeteroFL
from fedhm.methods.method import Method, Setup
from fedhm.methods.slimmed import Slimmed
from fedhm.methods.splitmix import SplitMix

METHODS: dict[str, Callable[..., Method]] = {
    "fedhm": FedHM,
    "fedavg": FedAvg,
    "slimmed": Slimmed,
    "heterofl": HeteroFL,
    "fedrolex": FedRolex,
    "fjord": FjORD,
    "splitmix": SplitMix,
    "fedpara": FedPara,
    "feddlr": FedDLR,
    "fedmd": FedMD,
    "feddf": FedDF,
}


def make_method(model: nn.Module, config: AnyMethodConfig, setup: Setup) -> Method:
    return METHODS[config.name](model, config, setup)

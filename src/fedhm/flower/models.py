"""The model of a run, made the same in every process that needs it, and the method around it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedhm.config.reading import parse_text
from fedhm.config.settings import Config
from fedhm.methods import make_method
from fedhm.methods.method import Method, Setup
from fedhm.networks.probe import probe
from fedhm.run import build_model
from fedhm.seeds import derive


@dataclass(frozen=True)
class OwnModel:
    """A user's. Two that are equal make the same model."""

    make: Callable[[], nn.Module]
    seed: int

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "model"))
            return self.make()


@dataclass(frozen=True)
class NamedModel:
    """That which a config names."""

    config: str
    input_shape: tuple[int, ...]
    classes: int

    def build(self) -> nn.Module:
        return build_model(parse_text(self.config, "the config"), self.input_shape, self.classes)


Model = OwnModel | NamedModel


@lru_cache(maxsize=4)
def dtype_of(model: Model) -> torch.dtype:
    """That of its weights."""
    return next((p.dtype for p in model.build().parameters() if p.is_floating_point()), torch.float32)


def method_of(model: Model, config: Config, batch: Tensor, classes: int) -> Method:
    """The run's method, for the networks and tiers that it has."""
    whole = model.build()
    fixed = config.federation.heterogeneity == "fixed"
    return make_method(whole, config.method, Setup(probe(whole, batch, classes), batch, config.seed, fixed=fixed))

"""The model of a run, made the same in every process that needs it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from fedhm.assembly import dtype_of
from fedhm.config.settings import ResolvedConfig
from fedhm.data.text_limits import TextLimits, limits_of
from fedhm.models.build import build_model
from fedhm.seeds import derive


@dataclass(frozen=True)
class OwnModel:
    """A user's own model. Two that are equal make the same model."""

    make: Callable[[], nn.Module]
    seed: int

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "model"))
            return self.make()


@dataclass(frozen=True)
class NamedModel:
    """The model that a config names."""

    config: ResolvedConfig
    input_shape: tuple[int, ...]
    outputs: int

    def build(self) -> nn.Module:
        return build_model(self.config, self.input_shape, self.outputs)


Model = OwnModel | NamedModel


@lru_cache(maxsize=4)
def demands(model: Model) -> tuple[torch.dtype, TextLimits]:
    """Return the type of a model's weights, and what it can read, without building the model with every message."""
    built = model.build()
    return dtype_of(built), limits_of(built)

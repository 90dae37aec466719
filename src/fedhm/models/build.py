"""Builds the model that a config names, if it fits into this machine's memory."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.machine.memory import MODEL_ADVICE, memory_errors
from fedhm.machine.process import memory_limit
from fedhm.models import MODELS
from fedhm.models.pretrained import read_pretrained
from fedhm.networks.exchange import exchanged_tensors, size_in_bytes
from fedhm.seeds import derive


@memory_errors("to build the model", MODEL_ADVICE)
def build_model(config: Config, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Build the model that a config names, initialised from its seed."""
    if config.model is None:
        raise FedhmError(
            "the config has no [model] section: the run has a model of its user's own, to be given again by model= in "
            "Python, or --model FILE.py:FUNCTION"
        )
    if config.model.base:
        model, per_token, seed = config.model, config.objective.per_token, derive(config.seed, "model")
        return read_pretrained(model.base, outputs, per_token, seed, model.pooling, model.dropout)
    make = partial(MODELS[config.model.name], num_classes=outputs, in_channels=input_shape[0], width=config.model.width)
    if config.model.has_init:
        make = partial(make, init=config.model.init)
    size = f"model.width = {config.model.width:g}"
    if config.model.name == "vit":
        make = partial(make, depth=config.model.depth, patch=config.model.patch, image=_image(input_shape))
        size += f" and model.depth = {config.model.depth}"
    if config.model.width > 2:  # smaller widths always fit
        _check_size(make, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "model"))
        return make()


def _image(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 3:
        raise FedhmError(f"model.name = 'vit' is for images, not for inputs of shape {shape}")
    return shape[1], shape[2]


def _check_size(make: Callable[[], nn.Module], given: str) -> None:
    """Refuse a model that is too large for this machine, before any memory is allocated."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            size = float(size_in_bytes(exchanged_tensors(make())))
    except (RuntimeError, OverflowError, TypeError):  # the size overflows torch's integers
        size = math.inf
    if 4 * size > memory_limit():  # the model, its initial weights, and a trained copy with its gradients
        raise FedhmError(f"{given} makes a model of {size / 1e9:,.0f} GB, too large to be trained in the memory here")

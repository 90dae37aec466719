"""Networks that come with the library. Any other `nn.Module` works as well."""

from collections.abc import Callable

from torch import nn

from fedhm.models.cnn import cnn
from fedhm.models.mlp import mlp
from fedhm.models.pooled import MeanPooled
from fedhm.models.resnet import resnet10, resnet18, resnet34
from fedhm.models.vit import vit

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "mlp": mlp,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "vit": vit,
}

__all__ = ["MODELS", "MeanPooled", "cnn", "mlp", "resnet10", "resnet18", "resnet34", "vit"]

"""The library's networks. Any other `nn.Module` works as well."""

from collections.abc import Callable

from torch import nn

from fedhm.models.images import cnn, mlp, resnet10, resnet18, resnet34, vit
from fedhm.models.pretrained import MeanPooled

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "mlp": mlp,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "vit": vit,
}

__all__ = ["MODELS", "MeanPooled", "cnn", "mlp", "resnet10", "resnet18", "resnet34", "vit"]

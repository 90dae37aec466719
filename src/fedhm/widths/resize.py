"""Making the layers of a network smaller, in place."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhm.errors import FedhmError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)
LAYERS = (*CONVOLUTIONS, nn.Linear, *NORMS)  # that can be made narrower


def depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, CONVOLUTIONS) and layer.groups > 1 and layer.groups == layer.in_channels


def inputs_of(layer: nn.Module) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return layer.in_channels
    return layer.in_features if isinstance(layer, nn.Linear) else outputs_of(layer)


def outputs_of(layer: nn.Module) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return layer.out_channels
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, _BatchNorm):
        return layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    assert isinstance(layer, nn.LayerNorm)
    if _over_several_axes(layer):
        raise FedhmError("a LayerNorm over several axes cannot be made narrower")
    return layer.normalized_shape[0]


def sizes_of(network: nn.Module) -> dict[str, list[int]]:
    """Return [outputs, inputs] by layer name, of the layers that can be resized."""
    layers = {n: m for n, m in network.named_modules() if type(m) in LAYERS and not _over_several_axes(m)}
    return {name: [outputs_of(layer), inputs_of(layer)] for name, layer in layers.items()}


def _over_several_axes(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1


def resize(layer: nn.Module, outputs: int, inputs: int) -> None:
    """Leave only the first `outputs` and `inputs` channels of a layer."""
    if isinstance(layer, CONVOLUTIONS):
        if depthwise(layer):
            layer.groups = inputs
            inputs_per_group = 1
        elif layer.groups > 1 and (outputs, inputs) != (layer.out_channels, layer.in_channels):
            raise FedhmError(f"a convolution in {layer.groups} groups cannot be made narrower")
        else:
            inputs_per_group = inputs // layer.groups
        layer.out_channels, layer.in_channels = outputs, inputs
        shape: tuple[int, ...] = (outputs, inputs_per_group)
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = outputs, inputs
        shape = (outputs, inputs)
    else:
        if isinstance(layer, nn.GroupNorm):
            if outputs % layer.num_groups:
                raise FedhmError(f"a GroupNorm of {layer.num_groups} groups cannot have {outputs} channels")
            layer.num_channels = outputs
        elif isinstance(layer, nn.LayerNorm):
            layer.normalized_shape = (outputs,)
        elif isinstance(layer, _BatchNorm):
            layer.num_features = outputs
        shape = (outputs,)
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(layer, name, nn.Parameter(_leading(parameter.detach(), shape), parameter.requires_grad))
    for name, buffer in layer.named_buffers(recurse=False):
        if buffer.ndim:  # not BatchNorm's counter
            setattr(layer, name, _leading(buffer, shape))


def _leading(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    where = tuple(slice(size) for size in shape[: tensor.ndim])
    return tensor[where].clone(memory_format=torch.contiguous_format)

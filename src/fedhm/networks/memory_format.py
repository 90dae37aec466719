"""Channels-last memory, in which convolutions of images run faster, and where it must not be used.

oneDNN, by which torch convolves on CPUs, writes past its workspace in the weight gradient of a strided 1×1 convolution
of channels-last images with fewer input channels than a vector register holds: the process dies, or the gradient is
wrong (oneDNN issue 6035). Narrow networks have such layers in their shortcuts. They get their inputs channels-first.
"""

import torch
from torch import Tensor, nn

from fedhm.networks.structure import run_in_training

REGISTER = 16  # floats in an AVX-512 register


def channels_last(network: nn.Module) -> nn.Module:
    """Prepare a network for training on channels-last images."""
    variants = [dict(each.named_modules()) for each, _ in run_in_training(network)]
    endangered = {name for layers in variants for name, layer in layers.items() if _endangered(layer)}
    for layers in variants:
        for name in endangered:
            layers[name].register_forward_pre_hook(_channels_first)
    # torch takes the format of a weight for that of the image
    kept = {id(p) for name in endangered for p in variants[0][name].parameters()}
    for parameter in network.parameters():
        if parameter.ndim == 4 and id(parameter) not in kept:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return network


def _endangered(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Conv2d) or layer.kernel_size != (1, 1) or layer.stride == (1, 1):
        return False
    return layer.in_channels // layer.groups < REGISTER


def _channels_first(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # `contiguous()` would keep the strides of an image with one channel, which is both at once
    return (arguments[0].clone(memory_format=torch.contiguous_format), *arguments[1:])

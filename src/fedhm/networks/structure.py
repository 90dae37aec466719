"""Operations on any network: copies, shared weights, the networks that train, initial weights, memory format."""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedhm.errors import FedhmError
from fedhm.networks.exchange import shared_parameters
from fedhm.networks.info import info_of


def copy_network(model: nn.Module) -> nn.Module:
    """Return a copy of a network that may be changed. Parameters of a shared base (`NetworkInfo`) are not copied.

    Tensors that share the memory of a parameter share it in the copy too.
    """
    memo: dict[Any, Any] = {}
    shared = info_of(model).shared
    try:
        for name, parameter in model.named_parameters():
            if name in shared:
                memo[id(parameter)] = parameter
            elif type(parameter) is nn.Parameter:  # its own deep copy would not share the memory
                memo[id(parameter)] = nn.Parameter(copy.deepcopy(parameter.data, memo), parameter.requires_grad)
        return copy.deepcopy(model, memo)
    except RuntimeError as error:  # torch cannot copy a weight that hooks have computed, such as old weight_norm's
        raise FedhmError(f"the model cannot be copied: {error}") from error


def copy_sharing_parameters(model: nn.Module) -> nn.Module:
    """Return a frozen copy of a network that reads the parameters of the original in their memory.

    A base may fill most of the memory. The copy must not be written to: a weight that is trained, or added to, is
    first replaced by a weight of its own.
    """
    memo: dict[Any, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters() if type(p) is nn.Parameter
    }
    try:
        copied = copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise FedhmError(f"the model cannot be copied: {error}") from error
    return copied.requires_grad_(False)


def unshare_base(networks: Iterable[nn.Module]) -> None:
    """Give networks a base of their own in place of the user's model: one base for all networks that shared it.

    Otherwise merging an adapter into the base, or training the model further, would change both.
    """
    own: dict[int, nn.Parameter] = {}
    keep: list[Tensor] = []  # an id is valid only while its tensor is alive
    for network in networks:
        shared = {id(parameter) for parameter in shared_parameters(network).values()}
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in shared - own.keys():
                    keep.append(parameter)
                    own[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                if parameter is not None and id(parameter) in shared:
                    module._parameters[name] = own[id(parameter)]


def weight_owners(model: nn.Module) -> Counter[int]:
    """Return, by the id of a parameter, how many modules of the model hold it."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


def has_normalisation(network: nn.Module) -> bool:
    """Tell whether a network has one of torch's normalisation layers."""
    return any(isinstance(m, _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm) for m in network.modules())


class TrainsSeveral(nn.Module):
    """A network that in training runs several networks, which share the weights of the first."""

    @property
    def passes_in_training(self) -> Sequence[tuple[nn.Module, Fraction]]:
        """Return the networks that run in training, the widest first, and the share of the batches of each."""
        raise NotImplementedError

    @property
    def heaviest_in_training(self) -> nn.Module:
        """Return the network as it runs in the batch that takes the most memory."""
        raise NotImplementedError


def networks_in_training(network: nn.Module) -> Sequence[tuple[nn.Module, Fraction]]:
    """Return the networks that run in training, the widest first, and the share of the batches in which each runs.

    A plain network runs in all batches. Ordered dropout and nested tiers run others, which share its weights.
    """
    if isinstance(network, TrainsSeveral):
        return network.passes_in_training
    info = info_of(network)
    inner = info.inner.networks if info.inner else ()
    return [(network, info.own_share), *((each, info.inner_share) for each in inner)]


def heaviest_in_training(network: nn.Module) -> nn.Module:
    """Return the network that runs in the batch with the most memory, where batches differ."""
    return network.heaviest_in_training if isinstance(network, TrainsSeveral) else network


def he_normal(network: nn.Module) -> None:
    """Draw the weights of convolutions from N(0, 2 / (outputs · kernel size)), and leave other weights unchanged.

    Torch's own weights are √6 times smaller. The gradient of a factor grows with the other factor, so smaller factors
    learn more slowly at first.
    """
    for layer in network.modules():
        if isinstance(layer, _ConvNd):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def reinitialise(network: nn.Module) -> nn.Module:
    """Draw all weights anew, by the rules with which the network was made, and return it.

    The rule of a layer is its `reset_parameters`. A network may have such a rule too, which runs after its layers'.
    """
    return network.apply(_reset)


def _reset(layer: nn.Module) -> None:
    if callable(reset := getattr(layer, "reset_parameters", None)):
        reset()


REGISTER = 16  # floats in an AVX-512 register


def channels_last(network: nn.Module) -> nn.Module:
    """Prepare a network for training on channels-last images, which convolutions process faster.

    oneDNN, by which torch convolves on CPUs, has a bug for such images (issue 6035). It writes past its workspace in
    the weight gradient of a strided 1×1 convolution with fewer input channels than a vector register holds. The process
    dies, or the gradient is wrong. Narrow networks have such layers in their shortcuts: they get channels-first inputs.
    """
    variants = [dict(each.named_modules()) for each, _ in networks_in_training(network)]
    endangered = {name for layers in variants for name, layer in layers.items() if _is_endangered(layer)}
    for layers in variants:
        for name in endangered:
            layers[name].register_forward_pre_hook(_to_channels_first)
    # torch takes the format of a weight for that of the image
    kept = {id(p) for name in endangered for p in variants[0][name].parameters()}
    for parameter in network.parameters():
        if parameter.ndim == 4 and id(parameter) not in kept:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return network


def _is_endangered(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Conv2d) or layer.kernel_size != (1, 1) or layer.stride == (1, 1):
        return False
    return layer.in_channels // layer.groups < REGISTER


def _to_channels_first(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # `contiguous()` would keep the strides of an image with one channel, which is in both formats at once
    return (arguments[0].clone(memory_format=torch.contiguous_format), *arguments[1:])

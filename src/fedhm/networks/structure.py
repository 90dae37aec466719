"""Operations on any network: copies, shared weights, the networks that train, initial weights, memory format."""

import copy
import copyreg
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import is_dataclass
from fractions import Fraction
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedhm.errors import FedhmError
from fedhm.networks.exchange import shared_parameters
from fedhm.networks.info import info_of

Memo = dict[Any, Any]  # of `copy.deepcopy`: the copies made so far, by the id of the original
ATOMIC = {
    *(type(None), bool, int, float, complex, str, bytes, Fraction, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.Size),
}
COLLECTIONS = {dict, OrderedDict, set}


def copy_network(model: nn.Module, without_values: Collection[str] = ()) -> nn.Module:
    """Return a copy of a network that may be changed. Parameters of a shared base (`NetworkInfo`) are not copied.

    Tensors that share the memory of a parameter share it in the copy too.

    without_values  parameters whose values are loaded afterwards, so that copying them would take time for nothing
    """
    memo: Memo = {}
    shared = info_of(model).shared
    try:
        for name, parameter in model.named_parameters():
            if name in shared:
                memo[id(parameter)] = parameter
            elif type(parameter) is nn.Parameter:  # torch would copy the values alone
                data = _copy_tensor(parameter.data, memo, values=name not in without_values)
                memo[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
        copied: nn.Module = deep_copy(model, memo)
        return copied
    except RuntimeError as error:  # torch cannot copy a weight that hooks have computed, such as old weight_norm's
        raise FedhmError(f"the model cannot be copied: {error}") from error


def copy_sharing_parameters(model: nn.Module) -> nn.Module:
    """Return a frozen copy of a network that reads the parameters of the original in their memory.

    A base may fill most of the memory. The copy must not be written to: a weight that is trained, or added to, is
    first replaced by a weight of its own.
    """
    memo: Memo = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters() if type(p) is nn.Parameter
    }
    try:
        copied: nn.Module = deep_copy(model, memo)
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


def deep_copy(value: Any, memo: Memo) -> Any:
    """Return a copy of a network, or of any value inside one, as `copy.deepcopy` makes it but ten times as fast.

    Every task trains a copy of its network. Copying a small network takes longer than a training step: each module has
    a dozen empty collections of hooks, and torch copies a tensor in twenty small steps. This function knows the usual
    types. It leaves all others to `copy.deepcopy`, with the same memo.
    """
    kind: Any = type(value)
    if kind in ATOMIC:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if kind is Tensor:
        return _copy_tensor(value, memo)
    if kind in COLLECTIONS:
        return _copy_entries(value, memo)
    if kind is list:
        copies = memo[id(value)] = []
        copies.extend(deep_copy(entry, memo) for entry in value)
        return copies
    if kind is tuple and all(type(entry) in ATOMIC for entry in value):
        return value
    if _is_ordinary(kind) and "__deepcopy__" not in vars(value):
        new = memo[id(value)] = kind.__new__(kind)
        held = value.__getstate__() or {}
        memo.setdefault(id(memo), []).append(held)  # keeps the entries alive while their ids are in the memo
        state = _copy_entries(held, memo)
        new.__setstate__(state) if isinstance(new, nn.Module) else vars(new).update(state)
        return new
    return copy.deepcopy(value, memo)


def _copy_entries(collection: Any, memo: Memo) -> Any:
    """Return a copy of a dict or a set. Most are empty, or have entries that need no copy."""
    if not collection:
        return memo.setdefault(id(collection), type(collection)())
    if type(collection) is set:
        return copy.deepcopy(collection, memo)
    entries = memo[id(collection)] = type(collection)()
    for key, entry in collection.items():
        if type(key) not in ATOMIC:
            key = deep_copy(key, memo)
        entries[key] = entry if type(entry) in ATOMIC else deep_copy(entry, memo)
    return entries


def _copy_tensor(tensor: Tensor, memo: Memo, values: bool = True) -> Tensor:
    """Return a copy of a tensor. Tensors that share their memory share it in the copy too.

    values  false: the copy's values do not matter
    """
    new = _clone(tensor, memo, values)
    if new is None:
        slowly: Tensor = copy.deepcopy(tensor, memo)
        return slowly
    memo[id(tensor)] = new
    return new


def _clone(tensor: Tensor, memo: Memo, values: bool) -> Tensor | None:
    """Return a clone that equals torch's deep copy, or None if only torch can make one."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.is_leaf:
        return None
    if vars(tensor) or tensor.grad is not None or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    memory, shared = tensor.untyped_storage(), memo.setdefault("torch", {})
    if memory._cdata in shared or not memory.nbytes() == tensor.numel() * tensor.element_size() > 0:
        return None  # the memory is shared with other tensors, or may be
    plain = tensor.detach()
    new = plain.clone(memory_format=torch.preserve_format) if values else torch.empty_like(plain)
    if new.stride() != tensor.stride():
        return None
    shared[memory._cdata] = new.untyped_storage()
    return new.requires_grad_(tensor.requires_grad)


@cache
def _is_ordinary(kind: type) -> bool:
    """Tell whether objects of this type are modules or dataclasses that a copy of their state copies."""
    if not issubclass(kind, nn.Module) and (not is_dataclass(kind) or len(kind.__mro__) > 2):
        return False
    usual = all(getattr(kind, name) is getattr(object, name) for name in ("__new__", "__reduce__", "__reduce_ex__"))
    special = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
    slots: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    own = any(hasattr(kind, name) for name in special) or kind in copyreg.dispatch_table
    return usual and not slots and not own and (issubclass(kind, nn.Module) or not hasattr(kind, "__setstate__"))


def weight_owners(model: nn.Module) -> Counter[int]:
    """Return, by the id of a parameter, how many modules of the model hold it."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


NORMALISATION = _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm


def has_normalisation(network: nn.Module) -> bool:
    """Tell whether a network has one of torch's normalisation layers."""
    return any(isinstance(module, NORMALISATION) for module in network.modules())


def after_normalisation(network: nn.Module) -> Sequence[str]:
    """Return the names of the modules that the network lists after its last normalisation layer."""
    names: list[str] = []
    for name, module in network.named_modules():
        names = [] if isinstance(module, NORMALISATION) else [*names, name]
    return names


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


Init = Literal["fan-out", "fan-in"]


def he_normal(network: nn.Module, init: Init = "fan-out") -> None:
    """Draw weights by He's rule, and leave all others unchanged.

    fan-out  the weights of convolutions, from N(0, 2 / (outputs · kernel size))
    fan-in   the weights of convolutions and Linear layers, from N(0, 2 / (inputs · kernel size))

    Torch's own weights are √6 times smaller. The gradient of a factor grows with the other factor, so smaller factors
    learn more slowly at first.
    """
    drawn = _ConvNd if init == "fan-out" else (_ConvNd, nn.Linear)
    for layer in network.modules():
        if isinstance(layer, drawn):
            mode: Literal["fan_in", "fan_out"] = "fan_out" if init == "fan-out" else "fan_in"
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")


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

    An image is flattened channels-first, so its gradient comes back channels-first. On CPUs, the pooling and activation
    layers before it would then convert between the formats, which takes longer. So it is converted once.
    """
    variants = [dict(each.named_modules()) for each, _ in networks_in_training(network)]
    endangered = {name for layers in variants for name, layer in layers.items() if _is_endangered(layer)}
    for layers in variants:
        for name in endangered:
            layers[name].register_forward_pre_hook(_to_channels_first)
        for layer in layers.values():
            if isinstance(layer, nn.Flatten):
                layer.register_forward_pre_hook(_keep_format_of_input)
            elif isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):  # it may be flattened by a function
                layer.register_forward_hook(_keep_format_of_output)
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


def _keep_format_of_input(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    for image in arguments[:1]:  # none, if it was named
        _keep_format(image)


def _keep_format_of_output(_: nn.Module, __: tuple[Tensor, ...], image: object) -> None:
    _keep_format(image)


def _keep_format(image: object) -> None:
    """Have the gradient of a channels-last image on the CPU in the same format."""
    if torch.compiler.is_compiling() or not isinstance(image, Tensor) or image.grad_fn is None:
        return  # pools may return indices, too; a hook would stay on a parameter
    if image.ndim != 4 or image.device.type != "cpu":
        return
    try:
        is_channels_last = image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous()
    except RuntimeError:  # functorch does not tell formats apart
        return
    if is_channels_last:
        image.register_hook(_to_channels_last)


def _to_channels_last(gradient: Tensor | None) -> Tensor | None:
    try:
        return None if gradient is None else gradient.contiguous(memory_format=torch.channels_last)
    except RuntimeError:  # a batch of gradients, by functorch
        return None  # the gradient stays as it is

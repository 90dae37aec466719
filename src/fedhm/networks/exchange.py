"""Numbers of 16 bits: many of them are summed in 32, where sums neither overflow nor lose their last digits."""

import hashlib
from typing import Protocol

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError


def upcast_half(tensor: Tensor) -> Tensor:
    """Return a tensor as it can be summed: one of 16 bits in float32, any other as it is."""
    return tensor.to(upcast_half_dtype(tensor.dtype))


def upcast_half_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Which tensors of a network travel, in which form, and how they are put back into one.

Tensors = dict[str, Tensor]


class Packing(Protocol):
    """The form in which tensors travel that a network holds in another. Those it does not concern pass as they are."""

    def pack(self, tensors: Tensors) -> Tensors:
        """Return what travels for the tensors that a network holds."""
        ...

    def unpack(self, tensors: Tensors) -> Tensors:
        """Return what a network holds for tensors that travelled: all of them, or only some."""
        ...


def set_packing(network: nn.Module, form: Packing | None) -> nn.Module:
    """Set the form in which `network` is exchanged from now on, and return it; with None, it travels as it is."""
    vars(network)["fedhm_wire_form"] = form
    return network


def set_shared_parameters(network: nn.Module, names: frozenset[str]) -> nn.Module:
    """Say which parameters of `network` never travel, since all have them: a frozen base. Copies share them."""
    vars(network)["fedhm_everybodys"] = names
    return network


def shared_parameters(network: nn.Module) -> Tensors:
    """Return the parameters that never travel, since everybody has them."""
    stays: frozenset[str] = vars(network).get("fedhm_everybodys", frozenset())
    return {name: parameter for name, parameter in network.named_parameters() if name in stays}


def exchanged_tensors(network: nn.Module) -> Tensors:
    """Return what travels of `network`: its real and complex numbers, each tensor once, in its wire form if it has one.

    Integers (counters, position tables) are not averaged. A tensor that the network holds under several names,
    because weights are tied or a submodule is shared, travels under its first name.
    """
    seen: set[int] = set()
    tensors: Tensors = {}
    stays: frozenset[str] = vars(network).get("fedhm_everybodys", frozenset())
    for name, tensor in network.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and is_averageable(tensor) and id(tensor) not in seen and name not in stays:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    form = _wire_form(network)
    return form.pack(tensors) if form else tensors


def untrained_names(network: nn.Module) -> frozenset[str]:
    """Return the names of tensors that travel, but that no optimizer steps on: buffers and frozen parameters."""
    own = network.state_dict(keep_vars=True)
    return frozenset(name for name in exchanged_tensors(network) if name in own and not own[name].requires_grad)


def load(network: nn.Module, tensors: Tensors) -> nn.Module:
    """Put travelled tensors into `network`. What did not travel keeps its value; an unknown name is an error."""
    return load_unpacked(network, unpack_tensors(network, tensors))


def unpack_tensors(network: nn.Module, tensors: Tensors) -> Tensors:
    """Return what `network` holds for travelled tensors."""
    form = _wire_form(network)
    return form.unpack(tensors) if form else tensors


def load_unpacked(network: nn.Module, tensors: Tensors) -> nn.Module:
    """Put tensors into `network` as `load` does, but in the form in which the network holds them."""
    own = network.state_dict()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            found = f"shape {tuple(own[name].shape)}" if name in own else "no such tensor"
            raise FedhmError(f"'{name}' of shape {tuple(tensor.shape)} does not fit the network, which has {found}")
    network.load_state_dict(tensors, strict=False)
    return network


def is_averageable(tensor: Tensor) -> bool:
    """Tell whether a mean of such tensors means something: integers are counters and tables."""
    return tensor.is_floating_point() or tensor.is_complex()


def cast_like(held: Tensors, tensors: Tensors) -> Tensors:
    """Return tensors in the types in which those of the same names are held."""
    return {name: t.to(held[name].dtype) if name in held else t for name, t in tensors.items()}


def _wire_form(network: nn.Module) -> Packing | None:
    return vars(network).get("fedhm_wire_form")


def size_in_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def structure_digest(network: nn.Module, input_shape: tuple[int, ...]) -> str:
    """Return what tells a network from others of another form, whatever its weights are."""
    form = [
        (name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(exchanged_tensors(network).items())
    ]
    return hashlib.sha256(f"{form}{tuple(input_shape)}".encode()).hexdigest()[:16]

"""The tensors of a network that travel between server and clients, and how they are loaded into a network."""

import hashlib

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.networks.info import Packing, declare, info_of

Tensors = dict[str, Tensor]


def set_packing(network: nn.Module, packing: Packing | None) -> nn.Module:
    """Set the form in which `network` is exchanged from now on, and return it; None is the network's own form."""
    return declare(network, packing=packing)


def shared_parameters(network: nn.Module) -> Tensors:
    """Return the parameters of the frozen base, which never travel."""
    shared = info_of(network).shared
    return {name: parameter for name, parameter in network.named_parameters() if name in shared}


def exchanged_tensors(network: nn.Module) -> Tensors:
    """Return the tensors of `network` that travel, each once, packed if the network has a packing."""
    return pack_tensors(network, held_tensors(network))


def held_tensors(network: nn.Module) -> Tensors:
    """Return the tensors of `network` that travel, each once, as it holds them.

    Only real and complex numbers travel: integers are counters and position tables, which have no mean. A tensor with
    several names, because weights are tied or a submodule is shared, travels under its first name.
    """
    info = info_of(network)
    seen: set[int] = set()
    tensors: Tensors = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and is_averageable(tensor) and id(tensor) not in seen and name not in info.shared:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def pack_tensors(network: nn.Module, tensors: Tensors) -> Tensors:
    """Return tensors that `network` holds in the form in which they travel."""
    packing = info_of(network).packing
    return packing.pack(tensors) if packing else tensors


def untrained_names(network: nn.Module) -> frozenset[str]:
    """Return the names of tensors that travel but that no optimizer changes: buffers and frozen parameters."""
    own = network.state_dict(keep_vars=True)
    return frozenset(name for name in exchanged_tensors(network) if name in own and not own[name].requires_grad)


def load(network: nn.Module, tensors: Tensors) -> nn.Module:
    """Load tensors that travelled into `network`, and return it.

    Tensors that are not given keep their values. An unknown name or another shape is an error.
    """
    return load_unpacked(network, unpack_tensors(network, tensors))


def unpack_tensors(network: nn.Module, tensors: Tensors) -> Tensors:
    """Return tensors that travelled in the form in which `network` holds them."""
    packing = info_of(network).packing
    return packing.unpack(tensors) if packing else tensors


def load_unpacked(network: nn.Module, tensors: Tensors) -> nn.Module:
    """Load tensors as `load` does, but in the form in which the network holds them."""
    own = network.state_dict()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            found = f"shape {tuple(own[name].shape)}" if name in own else "no such tensor"
            raise FedhmError(f"'{name}' of shape {tuple(tensor.shape)} does not fit the network, which has {found}")
    network.load_state_dict(tensors, strict=False)
    return network


def is_averageable(tensor: Tensor) -> bool:
    """Tell whether a mean of such tensors is meaningful. Integers are counters and tables."""
    return tensor.is_floating_point() or tensor.is_complex()


def cast_like(held: Tensors, tensors: Tensors) -> Tensors:
    """Return tensors in the types of the held tensors of the same names."""
    return {name: t.to(held[name].dtype) if name in held else t for name, t in tensors.items()}


def upcast_half(tensor: Tensor) -> Tensor:
    """Return 16-bit numbers in float32, and others unchanged: sums in 16 bits overflow and lose digits."""
    return tensor.to(upcast_half_dtype(tensor.dtype))


def upcast_half_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def size_in_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def structure_digest(network: nn.Module, input_shape: tuple[int, ...]) -> str:
    """Return a digest of the names, shapes and types of a network's tensors and of its inputs' shape."""
    travelling = sorted(exchanged_tensors(network).items())
    structure = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in travelling]
    return hashlib.sha256(f"{structure}{tuple(input_shape)}".encode()).hexdigest()[:16]

"""Which tensors of a network travel, and how they are put back into one."""

from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.messages import Tensors


def exchanged(network: nn.Module) -> Tensors:
    """The floating-point state of `network`, each tensor once.

    Integers (counters, position tables) are not averaged. A tensor that the network holds under several names,
    because weights are tied or a submodule is shared, travels under its first name.
    """
    seen: set[int] = set()
    tensors: Tensors = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def load(network: nn.Module, tensors: Tensors) -> nn.Module:
    """Puts travelled tensors into `network`. What did not travel keeps its value; an unknown name is an error."""
    own = network.state_dict()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            found = f"shape {tuple(own[name].shape)}" if name in own else "no such tensor"
            raise FedhmError(f"'{name}' of shape {tuple(tensor.shape)} does not fit the network, which has {found}")
    network.load_state_dict(tensors, strict=False)
    return network

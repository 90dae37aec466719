"""Facts about a network that its layers do not show, declared by the code that builds it.

These are the form in which its tensors travel, the frozen base that every client already has, the smaller networks that
train inside it, and the layers that its design keeps dense. `NetworkInfo` holds them all: `declare` is the only
function that writes it, `info_of` the only one that reads it.

The record is one attribute of the network. So every copy has it, also one by `copy.deepcopy`, and the state dict does
not change. A module wrapped around the network would have put a prefix before the names of all tensors. Privacy noise
is drawn by these names, and saved files have them as keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Protocol

from torch import Tensor, nn

_ATTRIBUTE = "fedhm_info"


class Packing(Protocol):
    """A form in which tensors travel that differs from the form in which a network holds them."""

    def pack(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to send for the tensors that a network holds."""
        ...

    def unpack(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that a network holds for tensors that travelled: all of them, or only some."""
        ...


class InnerNetworks(Protocol):
    """Smaller networks that train inside another one, with parts of its weights."""

    @property
    def networks(self) -> Sequence[nn.Module]: ...


@dataclass(frozen=True)
class NetworkInfo:
    """The declared facts about one network. The defaults hold for any plain `nn.Module`."""

    packing: Packing | None = None  # None: tensors travel as the network holds them
    shared: frozenset[str] = frozenset()  # parameters of a frozen base, which everyone has: they never travel
    frozen_base: bool = False  # the network adapts a base, whose BatchNorm statistics are frozen too
    inner: InnerNetworks | None = None
    own_share: Fraction = Fraction(1)  # of the training batches, in which the network itself runs
    inner_share: Fraction = Fraction(0)  # likewise of each inner network
    dense: Mapping[str, str] = field(default_factory=dict)  # layers that are never factorized, and why


def info_of(network: nn.Module) -> NetworkInfo:
    """Return the declared facts about a network."""
    # not getattr: peft's models look up missing attributes in the model that they wrap
    info: NetworkInfo = vars(network).get(_ATTRIBUTE, NetworkInfo())
    return info


def declare(network: nn.Module, **facts: Any) -> nn.Module:
    """Change some facts about a network, by the names of `NetworkInfo`'s fields, and return the network."""
    vars(network)[_ATTRIBUTE] = replace(info_of(network), **facts)
    return network

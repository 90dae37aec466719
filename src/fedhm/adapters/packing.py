"""How an adapted network travels: factors and heads, by the names that they have in the full model; never the base.

LoRA computes W x + α/r · B A x. What travels of a layer is u = A (r, m) and v = α/r · B (n, r), so that v u is what the
adapter adds to the weight, whatever its rank and α: nobody else in the library knows of α/r. All tiers have the same
α/r (`scale`), so that directions are learnt at the same speed at every rank.

A base that has learnt something (`folded`) comes as what is to be added to it, dense or as factors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fedhm.networks.exchange import Tensors

FOLDED = "folded "  # before a layer: what is added to its frozen weight; it is not sent back
_PREFIX = "base_model.model."
_A, _B, _HEAD = ".lora_A.default.weight", ".lora_B.default.weight", ".modules_to_save.default."


@dataclass(frozen=True)
class AdapterPacking:
    """The wire form of an adapted network."""

    layers: tuple[str, ...]
    scale: float  # α/r
    frozen: frozenset[str] = frozenset()  # factors that everybody has, by the names under which they would travel
    base: Mapping[str, Tensor] = field(default_factory=dict)  # by layer, where something is folded into it: W
    parts: tuple[str, str] = ("u", "v")  # how A and B are called: those that travel alone are no pair of factors
    heads: tuple[str, ...] = ()  # modules that are trained whole, each of one layer or of several

    def pack(self, tensors: Tensors) -> Tensors:
        packed: Tensors = {}
        for name, tensor in tensors.items():
            own = name.removeprefix(_PREFIX)
            if own.endswith(_A):
                packed[f"{own.removesuffix(_A)}.{self.parts[0]}"] = tensor
            elif own.endswith(_B):
                packed[f"{own.removesuffix(_B)}.{self.parts[1]}"] = tensor * self.scale
            elif _HEAD in own:
                packed[own.replace(_HEAD, ".")] = tensor
        return {name: tensor for name, tensor in packed.items() if name not in self.frozen}

    def unpack(self, tensors: Tensors) -> Tensors:
        unpacked: Tensors = {}
        for name, tensor in tensors.items():
            layer, _, part = name.rpartition(".")
            if name.startswith(FOLDED):
                continue
            if layer in self.layers and part == self.parts[0]:
                unpacked[f"{_PREFIX}{layer}{_A}"] = tensor
            elif layer in self.layers and part == self.parts[1]:
                unpacked[f"{_PREFIX}{layer}{_B}"] = tensor / self.scale
            else:
                unpacked[self._held_head(name)] = tensor
        for layer, weight in self.base.items():
            if (added := _added(tensors, layer)) is not None:
                unpacked[f"{_PREFIX}{layer}.base_layer.weight"] = weight + added
        return unpacked

    def _held_head(self, name: str) -> str:
        """Return under which name a network holds a tensor of its head."""
        module = next((head for head in self.heads if name.startswith(f"{head}.")), name.rpartition(".")[0])
        return f"{_PREFIX}{module}{_HEAD}{name.removeprefix(f'{module}.')}"

    def __deepcopy__(self, _: Any) -> "AdapterPacking":
        return self  # the base is not copied with every network


def adapter_factors(network: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield A (r, m) and B (n, r) of each layer of an adapted network, as it holds them."""
    own = dict(network.named_parameters())
    for name, a in own.items():
        if name.endswith(_A):
            yield a, own[name.removesuffix(_A) + _B]


def head_parameter_ids(network: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters that an adapted network trains whole."""
    return frozenset(id(parameter) for name, parameter in network.named_parameters() if _HEAD in name)


def _added(tensors: Tensors, layer: str) -> Tensor | None:
    whole, u, v = (tensors.get(f"{FOLDED}{layer}.{part}") for part in ("weight", "u", "v"))
    return whole if u is None or v is None else v @ u

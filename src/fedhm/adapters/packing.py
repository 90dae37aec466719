"""The form in which an adapted network travels: factors and heads, by their names in the full model, without the base.

LoRA computes W x + α/r · B A x. The factors of a layer travel as u = A (r, m) and v = α/r · B (n, r). So v u is the
matrix that the adapter adds to the weight, whatever its rank and α, and no other part of the library needs α/r. All
tiers have the same α/r (`scale`), so that directions are learnt at the same speed at every rank.

If the base itself learns (`folded`), the sum of its changes travels, dense or as factors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fedhm.networks.exchange import Tensors

FOLDED = "folded "  # before a layer's name: a matrix to add to its frozen weight, which is not sent back
_PREFIX = "base_model.model."
_A, _B, _HEAD = ".lora_A.default.weight", ".lora_B.default.weight", ".modules_to_save.default."


@dataclass(frozen=True)
class AdapterPacking:
    """The packing of an adapted network."""

    layers: tuple[str, ...]
    scale: float  # α/r
    frozen: frozenset[str] = frozenset()  # factors that do not travel, since everyone has them
    base: Mapping[str, Tensor] = field(default_factory=dict)  # W by layer, if something is folded into it
    parts: tuple[str, str] = ("u", "v")  # names of A and B; one that travels alone has another name
    heads: tuple[str, ...] = ()  # modules that are trained whole

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
        """Return the name under which a network holds a tensor of its head."""
        module = next((head for head in self.heads if name.startswith(f"{head}.")), name.rpartition(".")[0])
        return f"{_PREFIX}{module}{_HEAD}{name.removeprefix(f'{module}.')}"

    def __deepcopy__(self, _: Any) -> "AdapterPacking":
        return self  # so that the base is not copied with every network


def adapter_factors(network: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield A (r, m) and B (n, r) of each layer, as the adapted network holds them."""
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

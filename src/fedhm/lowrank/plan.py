"""Rank plans: which layers of a network are factorized, at which rank, and why the others are not.

The paper's hybrid network [ρ, L, γ]: the first ρ layers, 1×1 convolutions and the classifier stay dense; every
other layer gets rank γ · out_channels (convolution) or γ · min(m, n) (Linear). Of a transformer that is attention and
MLP: embeddings, and heads that are tied to them, stay dense.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from fedhm.errors import FedhmError
from fedhm.lowrank.decompositions.unroll import Form, unrolled_shape
from fedhm.lowrank.layers import LAYERS, forms_of, largest_rank, whole_rank
from fedhm.networks.structure import weight_owners

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
TIED = "its weight is tied to another layer's"
ROOT = "(model)"  # a model that has weights of its own, outside its layers


@dataclass(frozen=True, eq=False)  # equal as mappings are: the same ranks
class RankPlan(Mapping[str, int]):
    """Layer name → rank, for the layers that are factorized. `dense` says of every other layer why it is not."""

    decisions: Mapping[str, int | str]  # a rank, or the reason for none, in the order of the model
    form: Form = "spatial"  # of the factorized convolutions

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        return {name: what for name, what in self.decisions.items() if not isinstance(what, str)}

    @property
    def dense(self) -> dict[str, str]:
        return {name: what for name, what in self.decisions.items() if isinstance(what, str)}

    def __getitem__(self, layer: str) -> int:
        return self.ranks[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        width = max((len(name or ROOT) for name in self.decisions), default=0)
        return "\n".join(
            f"{name or ROOT:<{width}}  {f'rank {what}' if isinstance(what, int) else f'dense: {what}'}"
            for name, what in self.decisions.items()
        )


def plan_ranks(
    model: nn.Module,
    ratio: float | str,
    keep: int = 1,
    *,
    classifier: str | None = "auto",
    pointwise: bool = False,
    dense: Collection[str] = (),
    form: Form = "spatial",
) -> RankPlan:
    """Plan the hybrid network of `model` at rank ratio γ = `ratio`, a number or a fraction such as "1/8".

    keep        how many layers to leave dense at the start (the paper's ρ), in the order in which the model
                defines them; 1×1 convolutions and the classifier do not count
    classifier  the layer that gives the logits and stays dense; "auto" is the model's last layer if that is a
                Linear, None is no layer
    pointwise   factorize 1×1 convolutions too
    dense       further layers to leave as they are, or modules whose layers are left
    form        of the factors: "spatial", k×1 and 1×k convolutions, or "pufferfish", k×k and 1×1
    """
    if isinstance(ratio, str):
        try:
            ratio = float(Fraction(ratio)) if "/" in ratio else float(ratio)
        except (ValueError, ZeroDivisionError, OverflowError):
            raise FedhmError(f"'{ratio}' is not a rank ratio: write 0.125 or \"1/8\"") from None
    if not 0 < ratio <= 1:
        raise FedhmError(f"a rank ratio lies above 0 and at most at 1, not at {ratio:g}")
    if keep < 0:
        raise FedhmError(f"the number of layers to keep dense cannot be {keep}")
    if form not in get_args(Form):
        raise FedhmError(f"there is no form '{form}' of factorized layers, only {' and '.join(get_args(Form))}")
    layers = dict(_weighted_modules(model))
    asked = {name for name in layers for part in dense if f"{name}.".startswith(f"{part}.")}
    if unknown := [part for part in dense if not any(f"{name}.".startswith(f"{part}.") for name in layers)]:
        raise FedhmError(f"there is no layer '{unknown[0]}' with a weight matrix in this model to keep dense")
    if classifier == "auto":
        classifier = find_classifier(model)
    elif classifier is not None and classifier not in layers:
        raise FedhmError(f"there is no layer '{classifier}' with a weight matrix in this model to be the classifier")
    owners = weight_owners(model)

    decisions: dict[str, int | str] = {}
    counted = 0
    for name, layer in layers.items():
        reason = obstacle(layer, owners)
        if isinstance(layer, CONVOLUTIONS) and set(layer.kernel_size) == {1} and not pointwise:
            reason = reason or "a 1×1 convolution"
        elif name == classifier:
            reason = f"the classifier, and {reason}" if reason == TIED else "the classifier"
        elif _counts(layer):
            counted += 1
            if counted <= keep:
                reason = reason or f"among the first {keep} layers"
        if reason is None and name in asked:
            reason = "asked for"
        if reason is None and ratio == 1:
            reason = "the ratio is 1: the full network"
        if reason is None:
            decisions[name] = _affordable_rank(cast(Tensor, layer.weight).shape, ratio, form)
        else:
            decisions[name] = reason
    return RankPlan(decisions, form)


def find_classifier(model: nn.Module) -> str | None:
    """Return the name of the layer that gives the logits: the last layer with a weight matrix, if that is a Linear."""
    layers = list(_weighted_modules(model))
    return layers[-1][0] if layers and isinstance(layers[-1][1], nn.Linear) else None


def obstacle(layer: nn.Module, owners: Counter[int]) -> str | None:
    """Return why a layer of this kind cannot be replaced at all, whatever the ratio; None if it can."""
    if is_parametrized(layer):
        return "its weight is computed from other parameters"
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        return "its weight has no shape before the model has run once"
    if forms_of(layer) is None:
        return _unknown(layer)
    weight = layer._parameters.get("weight")
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters"
    if weight.is_complex():
        return "its weight is complex"
    if owners[id(weight)] > 1:
        return TIED
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "hooks are registered on it, which a new layer would lose"
    if isinstance(layer, CONVOLUTIONS) and layer.groups > 1:
        return f"a grouped convolution ({layer.groups} groups)"
    return None


def _unknown(layer: nn.Module) -> str:
    """Return why a layer whose type is not known stays dense."""
    kind = type(layer).__name__
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return f"an {kind}: rows of it are looked up, and no matrix is multiplied"
    if _counts(layer):
        return f"a {kind}, whose owner may use its weight without calling it"
    *others, last = (known.__name__ for known in LAYERS)
    return f"a {kind}: only {', '.join(others)} and {last} are factorized"


def _counts(layer: nn.Module) -> bool:
    """Tell whether a layer is one of those of which the first are kept dense."""
    return isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) or forms_of(layer) is not None


def _weighted_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue  # a part of the layer that it is computed for
        # the weight of a parametrized or a lazy layer is not among its own matrices
        computed = _counts(module) or is_parametrized(module)
        if computed or any(p.ndim >= 2 for p in module.parameters(recurse=False)):
            yield name, module


def _affordable_rank(shape: torch.Size, ratio: float, form: Form) -> int | str:
    """Return the rank at this ratio, or why it does not pay."""
    rank = min(max(1, round(ratio * whole_rank(shape))), largest_rank(shape, form))
    factored = rank * sum(unrolled_shape(shape, form))
    if factored >= shape.numel():
        return f"rank {rank} would hold {factored:,} parameters instead of {shape.numel():,}"
    return rank

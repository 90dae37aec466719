"""Rank plans: which layers of a network are factorized, at which rank, and why the others stay dense.

A plan by one ratio is the paper's hybrid network [ρ, L, γ]. The first ρ layers and the classifier stay dense. Every
other layer gets rank γ · out_channels (convolution) or γ · min(m, n) (Linear, 1×1 convolution, embedding, each weight
of a recurrent layer), if that saves parameters. Weights that are tied to each other stay dense, and so do layers that
the network's own code declares: the 1×1 shortcuts of the paper's ResNets.

A plan by budget chooses ranks layer by layer. With singular values σ₁ ≥ σ₂ ≥ … in a layer, and c the cost of one more
rank of it (parameters, or MACs),

    maximise  Σ over layers  Σ_{i ≤ r} σᵢ²        with  Σ over layers  r c  within the budget

Energies σᵢ² fall with i. So the best ranks take directions by energy per cost, σᵢ² / c, the largest first: this is
optimal up to one step (the fractional knapsack). It is one order of all directions, and the ranks of every budget are a
prefix of it. So a smaller budget never has a larger rank in any layer.

A flat spectrum, or that of random numbers, does not say which directions matter: the norm of such a weight only says
how it was drawn. Unless the spectra of most layers say more, all directions count the same, and layers get their ranks
in turns, each in proportion to its size. One ratio for all layers gives the same ranks.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property
from typing import cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from fedhm.errors import FedhmError
from fedhm.lowrank.layers import (
    RECURRENT,
    RECURRENT_WEIGHT,
    dense_weight_name,
    factorized_types,
    largest_rank,
    rank_at_ratio_one,
)
from fedhm.lowrank.svd import Form, unroll, unrolled_shape
from fedhm.machine.device import parallel_map
from fedhm.networks.info import info_of
from fedhm.networks.structure import weight_owners

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
UNKNOWN_TYPE = "a type of layer that is not factorized"
TIED = "its weight is tied to another layer's"
ROOT = "(model)"  # a model that has weights of its own, outside its layers


@dataclass(frozen=True, eq=False)  # plans are equal as mappings are, if their ranks are
class RankPlan(Mapping[str, int]):
    """Layer name → rank, for the factorized layers. `dense` gives the reason for every other layer."""

    decisions: Mapping[str, int | str]  # the rank, or the reason to stay dense, in the order of the model
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
    classifier: str | Collection[str] | None = "auto",
    pointwise: bool = True,
    dense: Collection[str] = (),
    form: Form = "spatial",
    max_rank: int = 0,
) -> RankPlan:
    """Plan the hybrid network of `model` at rank ratio γ = `ratio`, a number or a fraction such as "1/8".

    keep        how many layers to leave dense at the start (the paper's ρ), in the order in which the model
                defines them; 1×1 convolutions, embeddings, recurrent layers and the classifier do not count
    classifier  the layer that gives the logits, which stays dense, or several; "auto": the model's last layer if it is
                a Linear or a 1×1 convolution; None: no layer
    pointwise   factorize 1×1 convolutions too
    dense       further layers, or modules with layers, that stay dense; "*.shortcut" means all of these names
    form        the form of the factors: "spatial", k×1 and 1×k convolutions, or "pufferfish", k×k and 1×1
    max_rank    no layer has a larger rank than this, whatever its size; 0: no limit
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
    if max_rank < 0:
        raise FedhmError(f"the largest rank of a layer cannot be {max_rank}")
    if form not in get_args(Form):
        raise FedhmError(f"there is no form '{form}' of factorized layers, only {' and '.join(get_args(Form))}")
    weights = {weight.name: weight for weight in find_weights(model)}
    asked = {name for name in weights for part in dense if _is_part(name, part)}
    if unknown := [part for part in dense if not any(_is_part(name, part) for name in weights)]:
        raise FedhmError(f"there is no layer '{unknown[0]}' with a weight matrix in this model to keep dense")
    classifiers = _classifiers(model, classifier, weights)
    owners, declared = weight_owners(model), _declared_dense(model)

    decisions: dict[str, int | str] = {}
    counted = 0
    for name, weight in weights.items():
        layer = weight.layer
        reason = reason_to_stay_dense(layer, owners, weight.parameter) or declared.get(name)
        if weight.parameter == "weight" and RECURRENT_WEIGHT.fullmatch(name):
            reason = reason or "its name is that of a recurrent layer's weight"
        if name in classifiers:
            reason = f"the classifier, and {reason}" if reason == TIED else "the classifier"
        elif _is_pointwise(layer):
            reason = reason or (None if pointwise else "a 1×1 convolution")
        elif _counts(layer):
            counted += 1
            if counted <= keep:
                reason = reason or f"among the first {keep} layers"
        if reason is None and name in asked:
            reason = "asked for"
        if reason is None and ratio == 1:
            reason = "the ratio is 1: the full network"
        if reason is None:
            decisions[name] = _affordable_rank(weight.tensor.shape, ratio, form, max_rank)
        else:
            decisions[name] = reason
    return RankPlan(decisions, form)


@dataclass(frozen=True)
class NamedWeight:
    """A weight for which a rank plan decides: that of a layer, or one of those of a recurrent layer."""

    name: str  # in rank plans: that of the layer, or that of the recurrent layer's parameter
    layer: nn.Module
    parameter: str = "weight"

    @property
    def tensor(self) -> Tensor:
        return cast(Tensor, getattr(self.layer, self.parameter))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameter; for a layer without a weight of its own, all parameters that are matrices."""
        if self.parameter in self.layer._parameters:
            return [cast(nn.Parameter, self.tensor)]
        own = self.layer.parameters(recurse=is_parametrized(self.layer))
        return [p for p in own if not is_lazy(p) and p.ndim >= 2]


def find_weights(model: nn.Module) -> Iterator[NamedWeight]:
    """Yield the weights for which a rank plan decides, in the order of the model."""
    for name, layer in _weighted_modules(model):
        if type(layer) not in RECURRENT:
            yield NamedWeight(name, layer)
            continue
        for parameter, tensor in layer._parameters.items():
            if tensor is not None and tensor.ndim >= 2:
                yield NamedWeight(f"{name}.{parameter}" if name else parameter, layer, parameter)


def _is_part(name: str, part: str) -> bool:
    """Tell whether a layer is one of those that `part` names: a layer, a module around it, or a pattern of these."""
    if not any(sign in part for sign in "*?["):
        return f"{name}.".startswith(f"{part}.")
    pieces = name.split(".")
    return any(fnmatchcase(".".join(pieces[:count]), part) for count in range(1, len(pieces) + 1))


def _is_pointwise(layer: nn.Module) -> bool:
    return isinstance(layer, CONVOLUTIONS) and set(layer.kernel_size) == {1}


def _classifiers(model: nn.Module, given: str | Collection[str] | None, layers: Collection[str]) -> Collection[str]:
    """Return the names of the layers that give the outputs."""
    if given == "auto":
        last = list(_weighted_modules(model))[-1:]
        return [name for name, layer in last if isinstance(layer, nn.Linear) or _is_pointwise(layer)]
    names = () if given is None else (given,) if isinstance(given, str) else given
    if unknown := [name for name in names if name not in layers]:
        raise FedhmError(f"there is no layer '{unknown[0]}' with a weight matrix in this model to be the classifier")
    return names


def _declared_dense(model: nn.Module) -> dict[str, str]:
    """Return the layers that stay dense by the design of the network, or of a network inside it, and why."""
    return {
        f"{prefix}.{name}" if prefix else name: reason
        for prefix, module in model.named_modules()
        for name, reason in info_of(module).dense.items()
    }


def plan_parameters(model: nn.Module, plan: Mapping[str, int]) -> int:
    """Return how many trainable parameters the hybrid network of a plan has, without making it."""
    form = plan.form if isinstance(plan, RankPlan) else "spatial"
    total = sum(p.numel() for p in model.parameters() if p.requires_grad and not is_lazy(p))
    for weight in find_weights(model):
        if weight.name in plan and weight.tensor.requires_grad:
            shape = weight.tensor.shape
            total += plan[weight.name] * sum(unrolled_shape(shape, form)) - shape.numel()
    return total


PRECISION = 2**-20  # of a ratio: ranks have fewer digits


def ratio_of_share(model: nn.Module, share: float, make: Callable[[float], RankPlan]) -> float | None:
    """Return the largest ratio at which a plan keeps at most this share of the parameters; None if no ratio does.

    make  returns the plan of a ratio; a larger ratio never gives a smaller network
    """
    most = share * plan_parameters(model, {})

    def fits(ratio: float) -> bool:
        return plan_parameters(model, make(ratio)) <= most

    low, high = PRECISION, 1.0
    if not fits(low):
        return None
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def find_classifier(model: nn.Module) -> str | None:
    """Return the name of the layer that gives the logits: the last layer with a weight matrix, if it is a Linear."""
    layers = list(_weighted_modules(model))
    return layers[-1][0] if layers and isinstance(layers[-1][1], nn.Linear) else None


def reason_to_stay_dense(layer: nn.Module, owners: Counter[int], parameter: str = "weight") -> str | None:
    """Return why a weight of a layer cannot be factorized at any ratio, or None if it can."""
    if is_parametrized(layer):
        return "its weight is computed from other parameters"
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        return "its weight has no shape before the model has run once"
    if factorized_types(layer) is None and type(layer) not in RECURRENT:
        return _unknown(layer)
    weight = layer._parameters.get(parameter)
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters"
    if weight.is_complex():
        return "its weight is complex"
    if owners[id(weight)] > 1:
        return TIED
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "hooks are registered on it, which a new layer would lose"
    if isinstance(layer, CONVOLUTIONS) and layer.groups > 1:
        depthwise = layer.groups == layer.in_channels
        return "a depthwise convolution" if depthwise else f"a grouped convolution ({layer.groups} groups)"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return _unusual_table(layer)
    return None


def _unusual_table(table: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """Return why an embedding computes something that factors would not compute, or None."""
    if table.max_norm is not None:
        return "it rescales its rows itself (max_norm)"
    if table.sparse or table.scale_grad_by_freq:
        return "its gradients are sparse or scaled by frequency, which those of factors are not"
    if isinstance(table, nn.EmbeddingBag) and table.mode == "max":
        return "it takes the maximum of its rows, which factors do not keep"
    return None


def _unknown(layer: nn.Module) -> str:
    """Return why a layer of an unknown type stays dense."""
    kind = type(layer).__name__
    if _counts(layer):
        return f"a {kind}, whose owner may use its weight without calling it"
    return f"a {kind}, {UNKNOWN_TYPE}"


def _counts(layer: nn.Module) -> bool:
    """Tell whether a layer counts among the first `keep` layers."""
    known = isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d) or factorized_types(layer) is not None
    return known and not isinstance(layer, nn.Embedding | nn.EmbeddingBag)


def _weighted_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue  # it is a part of the layer whose weight it computes
        # the weight of a parametrized or lazy layer is not among its own parameters
        computed = _counts(module) or is_parametrized(module)
        if computed or any(p.ndim >= 2 for p in module.parameters(recurse=False)):
            yield name, module


def _affordable_rank(shape: torch.Size, ratio: float, form: Form, max_rank: int) -> int | str:
    """Return the rank at this ratio, or the reason to stay dense if the factors would not save parameters."""
    most = min(largest_rank(shape, form), max_rank or math.inf)
    rank = int(min(max(1, round(ratio * rank_at_ratio_one(shape))), most))
    factored = rank * sum(unrolled_shape(shape, form))
    if factored >= shape.numel():
        return f"rank {rank} would hold {factored:,} parameters instead of {shape.numel():,}"
    return rank


CHANCE = 0.1  # of a layer's energy: leading directions may have so much more than those of random numbers by chance
PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the directions, at which energies are compared with those of random numbers


@dataclass(frozen=True)
class LayerSpectrum:
    """The facts about a layer by which its rank is chosen."""

    energies: Sequence[float]  # all σ², the largest first
    shape: tuple[int, int]  # of its matrix
    whole: int  # its rank at ratio 1
    cost: float  # of one more rank

    @property
    def most(self) -> int:
        """Return the largest rank at which factorizing saves parameters. One step further the layer is dense."""
        return (math.prod(self.shape) - 1) // sum(self.shape)

    def kept(self, level: int) -> float:
        """Return the share of the energy that is kept at a rank; a dense layer keeps all of it."""
        total = sum(self.energies)
        return 1.0 if level > self.most or total <= 0 else sum(self.energies[:level]) / total

    @property
    def tells(self) -> bool:
        """Tell whether the leading directions have more of the energy than those of random numbers."""
        total, count = sum(self.energies), len(self.energies)
        for part in PARTS if total > 0 else ():
            rank = max(1, round(part * count))
            if sum(self.energies[:rank]) / total > random_share(self.shape, rank / count) + CHANCE:
                return True
        return False


def random_share(shape: tuple[int, int], part: float) -> float:
    """Return the energy share of the leading `part` of the directions of a matrix of random numbers.

    By the law of Marchenko and Pastur, at aspect β ≤ 1 the energies λ lie between a, b = (1 ± √β)² with the density
    √((b − λ)(λ − a)) / λ.
    """
    root = math.sqrt(min(shape) / max(shape))
    low, high = (1 - root) ** 2, (1 + root) ** 2
    singular = torch.linspace(1 + root, 1 - root, 2002, dtype=torch.float64)[1:-1]  # the density is 0 at the ends
    values = singular.square()  # even steps of singular values, since energies of a square matrix are dense at 0
    counts = ((high - values) * (values - low)).sqrt() / singular
    energy, counts = counts * values, counts.cumsum(0)
    reached = int((counts <= part * counts[-1]).sum())
    return float(energy[:reached].sum() / energy.sum())


def rank_order(layers: Mapping[str, LayerSpectrum]) -> list[str]:
    """Return the layers in the order in which each gets one more rank, after all have rank 1.

    A layer's last step makes it dense. The ranks of every budget are a prefix of this order.
    """
    known = 2 * sum(layer.tells for layer in layers.values()) > len(layers)

    def steps() -> Iterator[tuple[float, float, int, str]]:
        for number, (name, layer) in enumerate(layers.items()):
            energies = [energy / layer.cost if known else 0.0 for energy in layer.energies[: layer.most]]
            # the step to dense adds all that is left, for less than the cost of one more rank
            for rank, energy in enumerate([*energies[1:], energies[-1]], start=2):
                yield -energy, rank / layer.whole, number, name

    return [name for _, _, _, name in sorted(steps())]


def levels_after(layers: Mapping[str, LayerSpectrum], order: Sequence[str], count: int) -> dict[str, int]:
    """Return each layer's rank after `count` steps of the order; `most` + 1 means dense."""
    levels = dict.fromkeys(layers, 1)
    for name in itertools.islice(order, count):
        levels[name] += 1
    return levels


def plan_of_levels(start: RankPlan, layers: Mapping[str, LayerSpectrum], levels: Mapping[str, int]) -> RankPlan:
    """Return the rank plan at these levels; `start` has the layers that can be factorized."""
    decisions: dict[str, int | str] = dict(start.decisions)
    for name, level in levels.items():
        within = level <= layers[name].most
        decisions[name] = level if within else f"rank {level} would hold no fewer parameters"
    return RankPlan(decisions, start.form)


def levels_of_plan(layers: Mapping[str, LayerSpectrum], plan: Mapping[str, int]) -> dict[str, int]:
    """Return the levels of a rank plan; the level of a dense layer is one above its largest rank."""
    return {name: min(plan.get(name, layer.most + 1), layer.most + 1) for name, layer in layers.items()}


def layer_spectra(weights: Mapping[str, Tensor], start: RankPlan) -> dict[str, LayerSpectrum]:
    """Return the spectrum of every layer that `start` factorizes; the cost of a rank is its parameters."""

    def layer_of(name: str) -> LayerSpectrum:
        weight = weights[dense_weight_name(name)].detach()
        shape = unrolled_shape(weight.shape, start.form)
        return LayerSpectrum(
            squared_singular_values(unroll(weight, start.form)), shape, rank_at_ratio_one(weight.shape), sum(shape)
        )

    names = list(start)
    return dict(zip(names, parallel_map(layer_of, names), strict=True))


def with_rank_costs(layers: Mapping[str, LayerSpectrum], costs: Mapping[str, float]) -> dict[str, LayerSpectrum]:
    """Return the layers with other costs of a rank."""
    return {name: replace(layer, cost=costs[name]) for name, layer in layers.items()}


def squared_singular_values(matrix: Tensor) -> list[float]:
    """Return the squares of all singular values, the largest first."""
    if not bool(matrix.isfinite().all()):
        raise FedhmError("a weight matrix holds NaN or infinite values, so its ranks cannot be planned")
    precise = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    found: list[float] = torch.linalg.eigvalsh(precise @ precise.T).flip(0).clamp(min=0).tolist()
    return found

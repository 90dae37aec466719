"""Hybrid networks: made from any network and a rank plan, and turned back into the state of the full network."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.lowrank.hadamard import Hadamard, hadamard_of
from fedhm.lowrank.layers import (
    RECURRENT,
    LowRank,
    PufferfishConv2d,
    dense_weight_name,
    factorized_types,
    largest_rank,
    module_of,
)
from fedhm.lowrank.plan import NamedWeight, RankPlan, reason_to_stay_dense
from fedhm.lowrank.svd import to_layer_factors, unroll
from fedhm.networks.info import declare, info_of
from fedhm.networks.structure import copy_network, weight_owners


def to_hybrid(model: nn.Module, plan: Mapping[str, int], *, spectral: bool = True) -> nn.Module:
    """Return a copy of `model` in which every layer of `plan` is factorized at its rank, in the plan's form.

    The factors are the truncated SVD of the model's weights (spectral initialisation). With `spectral=False` they are
    zero, for a network whose weights are loaded next.
    """
    form = plan.form if isinstance(plan, RankPlan) else "spatial"

    def factorized(dense: nn.Module, weights: Sequence[NamedWeight]) -> nn.Module:
        ranks = {weight.parameter: plan[weight.name] for weight in weights}
        for weight in weights:
            rank, largest = plan[weight.name], largest_rank(weight.tensor.shape, form)
            if not isinstance(rank, Integral) or not 1 <= rank <= largest:
                raise FedhmError(
                    f"rank {rank} is impossible for layer '{weight.name}': it must lie between 1 and {largest}"
                )
        if type(dense) in RECURRENT:
            return RECURRENT[type(dense)](cast(nn.RNNBase, dense), ranks, spectral=spectral)
        forms = factorized_types(dense)
        assert forms is not None
        return forms[form](dense, ranks["weight"], spectral=spectral)

    return _with_new_layers(model, plan, factorized)


def to_hadamard(model: nn.Module, plan: Mapping[str, int], generator: torch.Generator | None = None) -> nn.Module:
    """Return a copy of `model` in which every layer of `plan` is composed of Hadamard factors of its rank.

    The factors are drawn from `generator`, at the scale of the model's weights. Without a generator they are zero, for
    a network whose weights are loaded next.
    """

    def composed(dense: nn.Module, weights: Sequence[NamedWeight]) -> Hadamard:
        return hadamard_of(dense)(dense, plan[weights[0].name], generator)

    return _with_new_layers(model, plan, composed)


def to_full(hybrid: nn.Module) -> dict[str, Tensor]:
    """Return the state of the full network that `hybrid` represents: each pair of factors becomes its product."""
    full = {name: tensor.detach() for name, tensor in hybrid.state_dict().items()}
    for name, layer in hybrid.named_modules(remove_duplicate=False):
        if isinstance(layer, LowRank | Hadamard):
            prefix = f"{name}." if name else ""
            for factor in layer.state_dict().keys() - {"bias"}:
                del full[f"{prefix}{factor}"]
            dense = layer.dense_name(name) if isinstance(layer, LowRank) else f"{prefix}weight"
            full[dense] = layer.weight.detach()
    return full


def plan_of(hybrid: nn.Module, kind: type[LowRank | Hadamard] = LowRank) -> RankPlan:
    """Return the rank plan of a network that is already factorized."""
    layers = {name: layer for name, layer in hybrid.named_modules() if isinstance(layer, kind)}
    pufferfish = any(isinstance(layer, PufferfishConv2d) for layer in layers.values())
    ranks = {name: layer.rank for name, layer in layers.items()}
    return RankPlan(ranks, "pufferfish" if pufferfish else "spatial")


def _with_new_layers(
    model: nn.Module, names: Iterable[str], make: Callable[[nn.Module, Sequence[NamedWeight]], nn.Module]
) -> nn.Module:
    """Return a copy of `model` in which every layer of `names` is replaced by `make(layer, its weights)`."""
    hybrid = copy_network(model)
    layers = dict(hybrid.named_modules())
    owners = weight_owners(hybrid)
    chosen: dict[nn.Module, list[NamedWeight]] = {}
    for name in names:
        weight = _named_weight(name, layers)
        if reason := reason_to_stay_dense(weight.layer, owners, weight.parameter):
            raise FedhmError(f"the rank plan factorizes '{name}', but it must stay dense: {reason}")
        chosen.setdefault(weight.layer, []).append(weight)
    for dense, weights in chosen.items():
        new = make(dense, weights)
        if dense is hybrid:
            return new
        _replace_everywhere(hybrid, dense, new)
    return hybrid


def _named_weight(name: str, layers: Mapping[str, nn.Module]) -> NamedWeight:
    """Return the weight of a layer, or of a recurrent layer one of its weights."""
    owner, _, parameter = name.rpartition(".")
    if type(layers.get(owner)) in RECURRENT and layers[owner]._parameters.get(parameter) is not None:
        return NamedWeight(name, layers[owner], parameter)
    if name not in layers or type(layers[name]) in RECURRENT:
        raise FedhmError(f"the rank plan factorizes '{name}', but the model has no such layer")
    return NamedWeight(name, layers[name])


def _replace_everywhere(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace `old` everywhere, so that a layer used in several places stays one layer."""
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


@dataclass(frozen=True)
class NestedTiers:
    """The smaller tiers inside a larger network. They have no weights of their own.

    A layer that the smaller tier has at rank r takes its weights from the larger network:

        factorized there   the leading columns, u[:r] and v[:, :r]
        dense there        L_r (L_rᵀ W), the part of W in its leading directions, with the server's L of this round
    """

    networks: Sequence[nn.Module]
    plans: Sequence[RankPlan]

    def layers(self, number: int, network: nn.Module | None = None) -> list[nn.Module]:
        """Return the layers that are smaller in one smaller tier, as they are in it or in another network."""
        holder = network or self.networks[number]
        return [holder.get_submodule(module_of(name)) for name in self.plans[number]]

    def forward(self, number: int, network: nn.Module, bases: Mapping[str, Tensor], *x: Tensor, **named: Tensor) -> Any:
        """Return the output of one smaller tier for a batch; its gradients go to the weights of `network`.

        bases  L by layer, of the layers that are dense in `network`
        """
        inner, plan = self.networks[number].train(network.training), self.plans[number]
        # running averages of `network` are those of its own activations: the inner network's go into copies
        own = dict(network.named_parameters()) | {name: buffer.clone() for name, buffer in network.named_buffers()}
        replaced = {n for n in own if n in plan or (n.rpartition(".")[0] in plan and not n.endswith(".bias"))}
        parts = {n: t for n, t in own.items() if n not in replaced}
        for layer, rank in plan.items():
            parts[f"{layer}.u"], parts[f"{layer}.v"] = _leading(layer, rank, own, bases, plan)
        return torch.func.functional_call(inner, parts, x, named)


def _leading(
    layer: str, rank: int, own: Mapping[str, Tensor], bases: Mapping[str, Tensor], plan: RankPlan
) -> tuple[Tensor, Tensor]:
    if f"{layer}.u" in own:
        return own[f"{layer}.u"][:rank], own[f"{layer}.v"][:, :rank]
    weight, left = own[dense_weight_name(layer)], bases[layer][:, :rank]
    return to_layer_factors(left, left.T @ unroll(weight, plan.form), weight.shape)


def nest_tiers(network: nn.Module, inside: NestedTiers, own: float, smaller: float) -> nn.Module:
    """Declare that smaller tiers train inside `network`, and return it. Its state stays the same.

    own, smaller  the shares of the batches in which the network itself runs, and in which a smaller tier runs
    """
    each = Fraction(smaller) / len(inside.networks)
    return declare(network, inner=inside, own_share=Fraction(own), inner_share=each)


def nested_tiers(network: nn.Module) -> NestedTiers:
    """Return the smaller tiers that train inside a network, as `nest_tiers` declared them."""
    inner = info_of(network).inner
    assert isinstance(inner, NestedTiers)
    return inner

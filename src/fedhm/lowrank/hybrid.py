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
from fedhm.lowrank.layers import LowRank, PufferfishConv2d, factorized_types, largest_rank
from fedhm.lowrank.plan import RankPlan, reason_to_stay_dense
from fedhm.lowrank.svd import to_layer_factors, unroll
from fedhm.networks.info import declare, info_of
from fedhm.networks.structure import copy_network, weight_owners


def to_hybrid(model: nn.Module, plan: Mapping[str, int], *, spectral: bool = True) -> nn.Module:
    """Return a copy of `model` in which every layer of `plan` is factorized at its rank, in the plan's form.

    The factors are the truncated SVD of the model's weights (spectral initialisation). With `spectral=False` they are
    zero, for a network whose weights are loaded next.
    """
    form = plan.form if isinstance(plan, RankPlan) else "spatial"

    def factorized(name: str, dense: nn.Module) -> LowRank:
        rank, largest = plan[name], largest_rank(cast(Tensor, dense.weight).shape, form)
        if not isinstance(rank, Integral) or not 1 <= rank <= largest:
            raise FedhmError(f"rank {rank} is impossible for layer '{name}': it must lie between 1 and {largest}")
        forms = factorized_types(dense)
        assert forms is not None
        return forms[form](dense, rank, spectral=spectral)

    return _with_new_layers(model, plan, factorized)


def to_hadamard(model: nn.Module, plan: Mapping[str, int], generator: torch.Generator | None = None) -> nn.Module:
    """Return a copy of `model` in which every layer of `plan` is composed of Hadamard factors of its rank.

    The factors are drawn from `generator`, at the scale of the model's weights. Without a generator they are zero, for
    a network whose weights are loaded next.
    """

    def composed(name: str, dense: nn.Module) -> Hadamard:
        return hadamard_of(dense)(dense, plan[name], generator)

    return _with_new_layers(model, plan, composed)


def to_full(hybrid: nn.Module) -> dict[str, Tensor]:
    """Return the state of the full network that `hybrid` represents: each pair of factors becomes its product."""
    full = {name: tensor.detach() for name, tensor in hybrid.state_dict().items()}
    for name, layer in hybrid.named_modules(remove_duplicate=False):
        if isinstance(layer, LowRank | Hadamard):
            prefix = f"{name}." if name else ""
            for factor in layer.state_dict().keys() - {"bias"}:
                del full[f"{prefix}{factor}"]
            full[f"{prefix}weight"] = layer.weight.detach()
    return full


def plan_of(hybrid: nn.Module, kind: type[LowRank | Hadamard] = LowRank) -> RankPlan:
    """Return the rank plan of a network that is already factorized."""
    layers = {name: layer for name, layer in hybrid.named_modules() if isinstance(layer, kind)}
    pufferfish = any(isinstance(layer, PufferfishConv2d) for layer in layers.values())
    ranks = {name: layer.rank for name, layer in layers.items()}
    return RankPlan(ranks, "pufferfish" if pufferfish else "spatial")


def _with_new_layers(model: nn.Module, names: Iterable[str], make: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """Return a copy of `model` in which every layer of `names` is replaced by `make(name, layer)`."""
    hybrid = copy_network(model)
    layers = dict(hybrid.named_modules())
    owners = weight_owners(hybrid)
    for name in names:
        dense = layers.get(name)
        if dense is None:
            raise FedhmError(f"the rank plan factorizes '{name}', but the model has no such layer")
        if reason := reason_to_stay_dense(dense, owners):
            raise FedhmError(f"the rank plan factorizes '{name}', but it must stay dense: {reason}")
        new = make(name, dense)
        if dense is hybrid:
            return new
        _replace_everywhere(hybrid, dense, new)
    return hybrid


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

    def forward(self, number: int, network: nn.Module, bases: Mapping[str, Tensor], *x: Tensor, **named: Tensor) -> Any:
        """Return the output of one smaller tier for a batch; its gradients go to the weights of `network`.

        bases  L by layer, of the layers that are dense in `network`
        """
        inner, plan = self.networks[number].train(network.training), self.plans[number]
        # running averages of `network` are those of its own activations: the inner network's go into copies
        own = dict(network.named_parameters()) | {name: buffer.clone() for name, buffer in network.named_buffers()}
        parts = {n: t for n, t in own.items() if n.rpartition(".")[0] not in plan or n.endswith(".bias")}
        for layer, rank in plan.items():
            parts[f"{layer}.u"], parts[f"{layer}.v"] = _leading(layer, rank, own, bases, plan)
        return torch.func.functional_call(inner, parts, x, named)


def _leading(
    layer: str, rank: int, own: Mapping[str, Tensor], bases: Mapping[str, Tensor], plan: RankPlan
) -> tuple[Tensor, Tensor]:
    if f"{layer}.u" in own:
        return own[f"{layer}.u"][:rank], own[f"{layer}.v"][:, :rank]
    weight, left = own[f"{layer}.weight"], bases[layer][:, :rank]
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

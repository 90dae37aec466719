"""The smaller tiers inside a larger one: networks that have no weights of their own.

A layer of the larger network, which the smaller one has at rank r, is there

    factorized   its leading columns: u[:r], v[:, :r]
    dense        L_r (L_rᵀ W), with the server's L of this round: what the weight has in its leading directions
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.lowrank.decompositions.unroll import split, unroll
from fedhm.lowrank.plan import RankPlan


@dataclass(frozen=True)
class Inside:
    """The networks of the smaller tiers inside another, and their rank plans."""

    networks: Sequence[nn.Module]
    plans: Sequence[RankPlan]

    def forward(self, number: int, network: nn.Module, bases: Mapping[str, Tensor], *x: Tensor, **named: Tensor) -> Any:
        """Return the output of one of them for a batch; `bases` has L, by layer, of those that are dense in `network`.

        Gradients go to the weights of `network`, of which it is a part.
        """
        inner, plan = self.networks[number].train(network.training), self.plans[number]
        # its running averages are those of what it sees itself: the inner network's go into copies
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
    return split(left, left.T @ unroll(weight, plan.form), weight.shape)


def contain(network: nn.Module, inside: Inside, own: float, smaller: float) -> nn.Module:
    """Put smaller networks inside `network`, whose state they do not add to, and return it.

    own, smaller  the shares of the batches in which the network itself runs, and one of those inside
    """
    each = Fraction(smaller) / len(inside.networks)
    vars(network)["fedhm_inside"] = inside
    vars(network)["passes_in_training"] = [(network, Fraction(own)), *((net, each) for net in inside.networks)]
    return network


def inside_of(network: nn.Module) -> Inside:
    inside: Inside = vars(network)["fedhm_inside"]
    return inside

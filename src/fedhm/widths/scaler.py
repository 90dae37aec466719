"""HeteroFL's scaler: fewer channels add up to as much as all of them do.

What comes out of a narrowed layer is divided by the share of channels that is left, y ← (W x + b) / share. Where a
normalisation follows, it undoes the division, so there is none. The published scalers act in training only, as
their networks normalise behind every layer, or are evaluated at full width. A narrow network whose layer has no
normalisation behind it would be another one in evaluation than it was in training; so a network that is handed out
has the division in its weights, W / share and b / share, and is a network like any other.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from fedhm.networks.exchange import Tensors
from fedhm.widths.width_plan import WidthPlan


def scaled_layers(plan: WidthPlan) -> set[str]:
    """Return the narrowed layers behind which no normalisation follows; the classifier keeps its outputs."""
    return {n for n, cut in plan.items() if cut.inputs and cut.outputs.kept < cut.outputs.full and not cut.normalised}


def with_scaler(network: nn.Module, plan: WidthPlan, share: float) -> nn.Module:
    """Make a narrowed network divide what comes out of its scaled layers, and return it."""
    for name in scaled_layers(plan):
        network.get_submodule(name).register_forward_hook(Scaler(share))
    return network


def divided(tensors: Tensors, plan: WidthPlan, share: float) -> Tensors:
    """Return the weights of a network with a scaler for the same network without one."""
    scaled = scaled_layers(plan)
    return {name: t / share if name.rpartition(".")[0] in scaled else t for name, t in tensors.items()}


@dataclass(frozen=True)
class Scaler:
    """A forward hook that divides outputs; it holds nothing but the share, so that networks with it can be copied."""

    share: float

    def __call__(self, _: nn.Module, __: object, output: Tensor) -> Tensor:
        return output / self.share

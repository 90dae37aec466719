"""HeteroFL's scaler: fewer channels add up to as much as all of them do.

What comes out of a narrowed layer is divided by the share of channels that is left, y ← (W x + b) / share. Where a
normalisation follows, it undoes the division, so there is none. The published scalers act in training only, as
their networks normalise behind every layer, or are evaluated at full width. A narrow network whose layer has no
normalisation behind it would be another one in evaluation than it was in training; so a network that is handed out
has the division in its weights, W / share and b / share, and is a network like any other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.networks.exchange import Tensors
from fedhm.networks.structure import TrainsSeveral
from fedhm.widths.plan import WidthPlan


def scaled_layers(plan: WidthPlan) -> set[str]:
    """Return the narrowed layers behind which no normalisation follows; the classifier keeps its outputs."""
    return {n for n, cut in plan.items() if cut.inputs and cut.outputs.kept < cut.outputs.full and not cut.normalised}


def with_scaler(network: nn.Module, plan: WidthPlan, share: float) -> nn.Module:
    """Make a narrowed network divide what comes out of its scaled layers, and return it."""
    for name in scaled_layers(plan):
        network.get_submodule(name).register_forward_hook(Scaler(share))
    return network


def divide_weights(tensors: Tensors, plan: WidthPlan, share: float) -> Tensors:
    """Return the weights of a network with a scaler for the same network without one."""
    scaled = scaled_layers(plan)
    return {name: t / share if name.rpartition(".")[0] in scaled else t for name, t in tensors.items()}


@dataclass(frozen=True)
class Scaler:
    """A forward hook that divides outputs; it holds nothing but the share, so that networks with it can be copied."""

    share: float

    def __call__(self, _: nn.Module, __: object, output: Tensor) -> Tensor:
        return output / self.share


# Several networks as one: the mean of their logits.


class Ensemble(nn.Module):
    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


# Ordered dropout: in training, every batch runs at a width drawn from several that lie inside one another.
#
# With distillation, the widest network f learns from the labels in every batch, and the drawn one g from f. The
# gradient of a batch is that of
#
#     loss(f(x), y) + divergence(g(x), f(x))        with f(x) held fixed in the second term
#
# where g is narrower than f; drawn itself, f has nothing to learn from itself. The divergence is over all outputs,
# also those of labels that the loss leaves alone because the client does not hold them.

Divergence = Callable[[Tensor, Tensor], Tensor]  # of a student's outputs from its teacher's


class OrderedDropout(TrainsSeveral):
    """`network` in evaluation; in training, for each batch, one of `narrower` with the leading weights of `network`.

    With a `divergence`, `network` runs in training too, and teaches the narrower one. `always` is the place of the
    network that every batch runs, 0 for the widest; None draws one.
    """

    def __init__(
        self,
        network: nn.Module,
        narrower: Sequence[nn.Module],
        divergence: Divergence | None = None,
        always: int | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self._narrower = list(narrower)  # a plain list: they have no weights of their own
        self._divergence, self._always = divergence, always

    @property
    def passes_in_training(self) -> Sequence[tuple[nn.Module, Fraction]]:
        share = Fraction(1, len(self._narrower) + 1)
        widest = share if self._divergence is None else Fraction(1)
        return [(self.network, widest), *((network, share) for network in self._narrower)]

    @property
    def heaviest_in_training(self) -> "OrderedDropout":
        place = 0 if self._divergence is None or not self._narrower else 1
        return OrderedDropout(self.network, self._narrower, self._divergence, place)

    def forward(self, x: Tensor) -> Tensor:
        drawn = self._draw() if self.training else 0
        if drawn and self._divergence is None:
            return self._leading(drawn, x)
        logits: Tensor = self.network(x)
        if drawn and self._divergence is not None:
            taught = self._divergence(self._leading(drawn, x), logits.detach())
            logits = _WithLoss.apply(logits, taught)  # type: ignore[no-untyped-call]
        return logits

    def _draw(self) -> int:
        return int(torch.randint(len(self._narrower) + 1, ())) if self._always is None else self._always

    def _leading(self, place: int, x: Tensor) -> Tensor:
        """Run a narrower network with the leading weights of the widest."""
        chosen = self._narrower[place - 1].train()
        own = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        shapes = {n: t.shape for n, t in (*chosen.named_parameters(), *chosen.named_buffers())}
        leading = {name: own[name][tuple(slice(size) for size in shape)] for name, shape in shapes.items()}
        logits: Tensor = torch.func.functional_call(chosen, leading, (x,))
        return logits


class _WithLoss(torch.autograd.Function):
    """Outputs that carry a loss of their own: whichever loss is computed from them, its gradient has this one's too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.like)

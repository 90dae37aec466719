"""What methods put around narrower networks: HeteroFL's scaler, ensembles, and FjORD's ordered dropout."""

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
    """Return the narrowed layers that no normalisation follows. The classifier keeps its outputs."""
    return {n for n, cut in plan.items() if cut.inputs and cut.outputs.kept < cut.outputs.full and not cut.normalised}


def with_scaler(network: nn.Module, plan: WidthPlan, share: float) -> nn.Module:
    """Add HeteroFL's scaler to a narrowed network, and return it: fewer channels add up to as much as all of them.

    The output of a narrowed layer is divided by the share of channels that it keeps, y ← (W x + b) / share. A
    normalisation would undo the division, so a layer before one is not scaled. The published scalers act in training
    only: their networks normalise after every layer, or are evaluated at full width. A narrow layer without
    normalisation would behave differently in evaluation. So the networks that users get have the division in their
    weights, W / share and b / share (`divide_weights`), and are ordinary networks.
    """
    for name in scaled_layers(plan):
        network.get_submodule(name).register_forward_hook(Scaler(share))
    return network


def divide_weights(tensors: Tensors, plan: WidthPlan, share: float) -> Tensors:
    """Return the weights with which a network without a scaler equals one with it."""
    scaled = scaled_layers(plan)
    return {name: t / share if name.rpartition(".")[0] in scaled else t for name, t in tensors.items()}


@dataclass(frozen=True)
class Scaler:
    """A forward hook that divides outputs. It holds only the share, so that networks with it can be copied."""

    share: float

    def __call__(self, _: nn.Module, __: object, output: Tensor) -> Tensor:
        return output / self.share


class Ensemble(nn.Module):
    """Several networks as one: its output is the mean of theirs."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


Divergence = Callable[[Tensor, Tensor], Tensor]  # of a student's outputs from its teacher's


class OrderedDropout(TrainsSeveral):
    """Ordered dropout: in training, every batch runs at a width that is drawn at random; evaluation runs `network`.

    The networks of `narrower` have the leading weights of `network`. With a `divergence`, the widest network f learns
    from the labels in every batch, and the drawn network g from f. The gradient of a batch is that of

        loss(f(x), y) + divergence(g(x), f(x))        with f(x) held fixed in the second term

    if g is narrower than f; if f itself is drawn, the second term is left out. The divergence is over all outputs, also
    those of labels that the loss masks because the client does not have them.

    always  the position of the network that every batch runs, 0 for the widest; None: a random one
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
        self._narrower = list(narrower)  # a plain list, since they have no weights of their own
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
    """Outputs with a loss of their own: the gradient of any loss of the outputs includes the gradient of this one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.like)

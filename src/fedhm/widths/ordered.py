"""Ordered dropout: in training, every batch runs at a width drawn from several that lie inside one another.

With distillation, the widest network f learns from the labels in every batch, and the drawn one g from f. The gradient
of a batch is that of

    loss(f(x), y) + divergence(g(x), f(x))        with f(x) held fixed in the second term

where g is narrower than f; drawn itself, f has nothing to learn from itself. The divergence is over all outputs, also
those of labels that the loss leaves alone because the client does not hold them.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

Divergence = Callable[[Tensor, Tensor], Tensor]  # of a student's outputs from its teacher's


class OrderedDropout(nn.Module):
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
        """Return the networks that run in training, the widest first, and in which share of the batches each does."""
        share = Fraction(1, len(self._narrower) + 1)
        widest = share if self._divergence is None else Fraction(1)
        return [(self.network, widest), *((network, share) for network in self._narrower)]

    @property
    def heaviest_in_training(self) -> "OrderedDropout":
        """Return the network as it is in the batch that takes the most memory."""
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

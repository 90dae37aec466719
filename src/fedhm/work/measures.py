"""Measures of every local step: the gradient's norm, and the norms of the factors.

The constants κ_g and κ_UV of the convergence bound hold at every iteration, so only the client can measure them. Sums
and maxima stay tensors on the client's device: no step waits for a number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedhm.lowrank.layers import LowRank
from fedhm.networks.exchange import upcast_half
from fedhm.work.messages import Task, TrainingMeasures


class StepMeasures:
    """What is measured while a network is trained."""

    def __init__(self, network: nn.Module) -> None:
        self._trained = [p for p in network.parameters() if p.requires_grad]
        self._factors = [p for m in network.modules() if isinstance(m, LowRank) for p in (m.u, m.v)]
        device = self._trained[0].device if self._trained else None
        self._squares = self._largest = torch.zeros((), dtype=torch.float64, device=device)
        self._steps = 0

    @torch.no_grad()
    def add_step(self) -> None:
        """Measure the gradient that the parameters hold, and the factors before the step that follows."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        if gradients:
            self._squares = self._squares + squared_norm(gradients)
        self._measure_factors()
        self._steps += 1

    @torch.no_grad()
    def result(self) -> TrainingMeasures:
        """Return the measures of all steps, and of the factors after the last one."""
        self._measure_factors()
        return TrainingMeasures(self._squares.item() / max(1, self._steps), self._largest.item())

    def _measure_factors(self) -> None:
        if self._factors:
            self._largest = torch.maximum(_norms(self._factors).max(), self._largest)


def measures_for(task: Task, network: nn.Module) -> StepMeasures | None:
    """Return what measures the steps of a task; None if the task does not ask for it."""
    return StepMeasures(network) if task.options.measure else None


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of all tensors together, in float64 and on their device."""
    return _norms(tensors).square().sum()


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor, in float64: in float32 the squares of large norms are infinite."""
    plain = [upcast_half(t.coalesce().values() if t.is_sparse else t) for t in tensors]
    return torch.stack([norm.double() for norm in torch._foreach_norm(plain)])

"""SGD by torch's own function, without the class `torch.optim.SGD`.

That class imports torch's compiler, which takes over a second: about as long as importing torch and fedhm. A process
that lives for one small task computes for less time than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


class Optimizer(Protocol):
    """The methods of an optimizer that training calls. Torch's optimizers have them."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


def step_unless(optimizer: Optimizer, overflow: Tensor | None) -> None:
    """Make a step, unless gradients overflowed (1 on the device). The host does not wait to know."""
    if isinstance(optimizer, SGD):
        optimizer.overflow = overflow
    elif overflow is not None:
        optimizer.found_inf = overflow  # type: ignore[attr-defined]  # as torch's GradScaler tells fused optimizers
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained alike."""

    parameters: Sequence[nn.Parameter]
    weight_decay: float = 0.0
    lr_factor: float = 1.0  # times the learning rate


class SGD:
    """Steps that equal those of `torch.optim.SGD` with the same arguments, bit for bit."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        fused: bool | None = None,
    ) -> None:
        self._groups, self._lr, self._momentum, self._dampening = groups, lr, momentum, dampening
        self._nesterov, self._fused = nesterov, fused
        self.overflow: Tensor | None = None  # 1: the next step is left out; only fused steps can be
        self._averages: dict[nn.Parameter, Tensor | None] = {}  # momentum buffers, from the first step on

    def zero_grad(self) -> None:
        for group in self._groups:
            for parameter in group.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self._groups:
            moved = [parameter for parameter in group.parameters if parameter.grad is not None]
            gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
            averages = [self._averages.get(parameter) for parameter in moved] if self._momentum else []
            if self.overflow is not None:  # a first step that is left out would leave averages without values
                averages = [
                    torch.zeros_like(p) if average is None else average
                    for p, average in zip(moved, averages, strict=False)
                ]
            sgd(
                list(moved),
                gradients,
                averages,
                has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
                fused=self._fused,
                weight_decay=group.weight_decay,
                momentum=self._momentum,
                lr=self._lr * group.lr_factor,
                dampening=self._dampening,
                nesterov=self._nesterov,
                maximize=False,
                found_inf=self.overflow,
            )
            if self._momentum:
                self._averages.update(zip(moved, averages, strict=True))

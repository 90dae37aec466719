"""Steps of SGD by torch's own function, without the class around it.

`torch.optim.SGD` imports torch's compiler, which takes almost as long as importing torch, and longer than what a
process computes that lives for one small task.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


class Optimizer(Protocol):
    """What training needs of an optimizer; those of torch have it."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


@dataclass(frozen=True)
class ParameterGroup:
    parameters: Sequence[nn.Parameter]
    weight_decay: float = 0.0
    lr_factor: float = 1.0  # on the learning rate


class SGD:
    """Does what `torch.optim.SGD` does with the same arguments, to the last bit."""

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
        self._averages: dict[nn.Parameter, Tensor | None] = {}  # of the gradients, from the first step on

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
            )
            if self._momentum:
                self._averages.update(zip(moved, averages, strict=True))

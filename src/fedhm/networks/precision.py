"""Training in 16 bits: forward passes by autocast, and gradients that are scaled so that float16 does not lose them.

Weights, their steps and losses stay in float32. The network's outputs are cast back before the loss sees them.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "bf16", "fp16"]
FIRST_SCALE = 2.0**16  # of float16; it is halved when gradients overflow, and doubled after many steps without
GROWTH_STEPS = 2000


class MixedPrecision:
    """The precision of one task's training."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._device = device
        self._dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self._scaled = precision == "fp16"
        self._scale = torch.full((), FIRST_SCALE, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward pass in this precision, which gives float32 scores. In float32, it is the given one."""
        if self._dtype is None:
            return forward

        def cast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self._device.type, self._dtype):
                output = forward(*args, **kwargs)
            found = output if isinstance(output, Tensor) else getattr(output, "logits", output)
            return found.float() if isinstance(found, Tensor) else output  # `forward_batch` refuses others

        return cast

    def backward(self, loss: Tensor, run: Callable[[Tensor], None] = Tensor.backward) -> None:
        """Add the gradients of a loss to those of the parameters, scaled if need be; `run` back-propagates."""
        run(loss * self._scale if self._scaled else loss)

    def unscale(self, trained: Iterable[nn.Parameter]) -> Tensor | None:
        """Undo the scale of the gradients; return whether one overflowed, as 0 or 1 on the device; None: no scale.

        Torch's GradScaler does the same, but the host waits for every step.
        """
        if not self._scaled:
            return None
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        overflow = torch.zeros((), device=self._device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self._scale.reciprocal())
        torch._amp_update_scale_(self._scale, self._growth, overflow, 2.0, 0.5, GROWTH_STEPS)
        return overflow

"""Numbers of 16 bits: many of them are summed in 32, where sums neither overflow nor lose their last digits."""

import torch
from torch import Tensor


def precise(tensor: Tensor) -> Tensor:
    """Return a tensor as it can be summed: one of 16 bits in float32, any other as it is."""
    return tensor.to(precise_type(tensor.dtype))


def precise_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

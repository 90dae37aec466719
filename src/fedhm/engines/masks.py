"""Attention masks of transformers on an accelerator, made without waiting for it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from fedhm.machine.device import CPU

KINDS = ("sdpa", "eager")  # of attention, in transformers' words
# Attention without a mask has faster kernels that take less memory. From this many tokens on they are worth a wait.
LONG = 1024


@contextmanager
def masks_without_waiting(device: torch.device) -> Iterator[None]:
    """Let models of transformers make their masks on an accelerator without asking whether anything is padded.

    In each forward pass transformers asks for `mask.all()`, to leave out a mask that hides nothing. The host then waits
    for all steps before. Here such a mask is made, which changes results by rounding at most. On a CPU nothing changes.
    """
    module: Any = sys.modules.get("transformers.masking_utils")  # a model of transformers has imported it
    if device == CPU or module is None:
        yield
        return
    registry = module.AttentionMaskInterface
    before = {kind: registry()[kind] for kind in KINDS}
    for kind, make in before.items():
        registry.register(kind, _without_waiting(make))
    try:
        yield
    finally:
        for kind, make in before.items():
            registry.register(kind, make)


@lru_cache
def _without_waiting(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes short masks always. It is the same one each time, so nothing is compiled again."""

    def always(*args: Any, **given: Any) -> Any:
        mask = given.get("attention_mask")
        if mask is not None and mask.shape[-1] < LONG:
            given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return make(*args, **given)

    return always

"""Where the time of a training step goes: every layer's forward and backward pass, timed in place."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedhm.lowrank.layers import LowRank

SGD = "SGD step"
REST = "ReLU, sums, loss"  # operations that are no layers


class LayerTimes:
    """Seconds by layer of one training step. Backward passes run one after the other, so that each can be bracketed."""

    def __init__(self, network: nn.Module) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._begun: dict[str, float] = {}
        self._handles = ExitStack()
        self._first = next(iter(layers(network)))
        for name, layer in layers(network).items():
            begin, end = self._hook(self._begin, name), self._hook(self._end, name)
            self._handles.enter_context(layer.register_forward_pre_hook(begin))
            self._handles.enter_context(layer.register_forward_hook(end))
            if name == self._first:  # images need no gradient, without which torch has no backward hooks of a layer
                watch = partial(self._watch_gradient, begin)
                self._handles.enter_context(layer.register_forward_hook(watch))
            else:
                self._handles.enter_context(layer.register_full_backward_pre_hook(begin))
                self._handles.enter_context(layer.register_full_backward_hook(end))

    def step(self, network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> dict[str, float]:
        self.seconds.clear()
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        self._end(self._first)  # its backward pass is the last
        backward = time.perf_counter()
        self.seconds[REST] = backward - start - sum(self.seconds.values())
        optimizer.step()
        self.seconds[SGD] = time.perf_counter() - backward
        return dict(self.seconds)

    def remove(self) -> None:
        self._handles.close()

    def _begin(self, name: str) -> None:
        self._begun[name] = time.perf_counter()

    def _end(self, name: str) -> None:
        self.seconds[name] += time.perf_counter() - self._begun[name]

    @staticmethod
    def _watch_gradient(begin: Callable[..., None], _: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(begin)

    @staticmethod
    def _hook(what: Callable[[str], None], name: str) -> Callable[..., None]:
        return lambda *_: what(name)


def layers(network: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, LowRank)
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, kinds)}


def layer_macs(network: nn.Module, shape: tuple[int, ...]) -> dict[str, int]:
    """Return the MACs of every layer in one sample's forward pass."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        network.eval()(torch.zeros(1, *shape))
    network.train()
    counts = {module.partition(".")[2]: sum(by.values()) // 2 for module, by in counter.get_flop_counts().items()}
    return {name: counts.get(name, 0) for name in layers(network)}


def part_of(name: str, layer: nn.Module | None) -> str:
    """Return the row of the table to which a layer belongs."""
    if layer is None:
        return name
    if isinstance(layer, nn.BatchNorm2d):
        return "BatchNorm"
    if isinstance(layer, nn.Linear):
        return "classifier"
    if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
        return "1×1 shortcuts"
    stage = name.partition(".")[0]
    return f"3×3 in {stage}" if "." in name else "first convolution"

"""The networks of one process: each is prepared once, and every task gets a copy.

A task trains its copy and discards it. So the result cannot depend on earlier tasks, even if a network keeps state in
attributes, lists or buffers that are not saved.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.machine.device import CPU
from fedhm.networks.exchange import Tensors, exchanged_tensors, load_unpacked, unpack_tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.networks.structure import channels_last, copy_network

MOST = 16  # prepared networks at a time; methods have fewer


@dataclass(frozen=True)
class PreparedNetwork:
    """A network that is prepared for a task."""

    network: nn.Module
    forward: Callable[..., Any]  # the network, perhaps compiled
    discarded: bool = True  # after the task; a compiled network is used again

    def hand_over(self, names: Iterable[str]) -> Tensors:
        """Return the exchanged tensors of these names, to keep. The network must not be used afterwards."""
        trained = exchanged_tensors(self.network)
        return {name: self._kept(trained[name]) for name in names}

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if a copy would have the same layout."""
        # a tensor of four dimensions may be channels-last, or have odd strides of axes of length 1
        if self.discarded and tensor.device == CPU and tensor.ndim != 4 and tensor.is_contiguous():
            return tensor
        return tensor.to(CPU, copy=True, memory_format=torch.contiguous_format)


class NetworkPool:
    """Networks by spec, for one task at a time. `build` makes a new network, whose weights are loaded afterwards."""

    def __init__(
        self,
        build: Callable[[NetworkSpec], nn.Module],
        device: torch.device = CPU,
        compiled: bool = False,
        most: int = MOST,
    ) -> None:
        self.device = device
        self._build, self._compiled, self._most = build, compiled, most
        self._prepared: dict[NetworkSpec, nn.Module] = {}  # in the order of their last use
        self._used: dict[NetworkSpec, PreparedNetwork] = {}  # compiled networks

    @contextmanager
    def loaded(self, spec: NetworkSpec, tensors: Tensors) -> Iterator[PreparedNetwork]:
        """Yield the network of a spec with `tensors` in it. All other values are those of a new network."""
        prepared = self._network(spec)
        ready = self._compiled_once(spec, prepared) if self._compiled else _ready(copy_network(prepared))
        load_unpacked(ready.network, unpack_tensors(ready.network, tensors))
        yield ready

    def _network(self, spec: NetworkSpec) -> nn.Module:
        network = self._prepared.pop(spec, None)
        if network is None:
            network = channels_last(self._build(spec).to(self.device))
        self._prepared[spec] = network
        while len(self._prepared) > self._most:
            oldest = next(iter(self._prepared))
            del self._prepared[oldest]
            self._used.pop(oldest, None)
        return network

    def _compiled_once(self, spec: NetworkSpec, prepared: nn.Module) -> PreparedNetwork:
        """Return the compiled network, with the values of a new one. Compiling takes too long to do it per task."""
        if spec not in self._used:
            network = copy_network(prepared)
            self._used[spec] = PreparedNetwork(network, torch.compile(network), discarded=False)
        network = self._used[spec].network
        with torch.no_grad():
            for used, new in zip(_tensors(network), _tensors(prepared), strict=True):
                used.copy_(new)
                used.requires_grad_(new.requires_grad)
                used.grad = None
        return self._used[spec]


def _ready(network: nn.Module) -> PreparedNetwork:
    return PreparedNetwork(network, network)


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def check_compiler(device: torch.device) -> None:
    """Raise if `torch.compile` does not work, for example without a C++ compiler."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3, device=device))
    except Exception as error:  # whatever the compiler raises
        raise FedhmError(
            f"engine.compile = true, but torch.compile does not work here: {str(error).partition(chr(10))[0]}"
        ) from error

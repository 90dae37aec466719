"""The networks of one process: each is prepared once, and every task gets a copy.

A task trains its copy and discards it. So the result cannot depend on earlier tasks, even if a network keeps state in
attributes, lists or buffers that are not saved.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.machine.device import CPU, move_tensors
from fedhm.networks.exchange import (
    Tensors,
    held_tensors,
    load_unpacked,
    pack_tensors,
    shared_parameters,
    unpack_tensors,
)
from fedhm.networks.info import info_of
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
        held = held_tensors(self.network)
        on_host = all(tensor.device == CPU for tensor in held.values())
        trained = pack_tensors(self.network, held if on_host else move_tensors(held, CPU))
        return {name: self._kept(trained[name]) if on_host else trained[name] for name in names}

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if a copy would have the same layout."""
        # a tensor of four dimensions may be channels-last, or have odd strides of axes of length 1
        if self.discarded and tensor.ndim != 4 and tensor.is_contiguous():
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)


def load_from_host(network: nn.Module, tensors: Tensors, device: torch.device) -> None:
    """Load tensors that travelled into a network on a device. They are unpacked here, where a packing has its base."""
    held = unpack_tensors(network, tensors)
    load_unpacked(network, held if device == CPU else move_tensors(held, device))


def on_device(network: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a network on a device; on the CPU, the network itself."""
    return network if device == CPU else _place(copy_network(network), device, {})


def _place(network: nn.Module, device: torch.device, base: dict[int, nn.Parameter]) -> nn.Module:
    """Move a network to a device, all its tensors in one copy, and return it.

    `Module.to` would move the parameters of a shared base under the other networks that have them.

    base  parameters of shared bases that are on the device already, by the id of the original
    """
    shared = {id(parameter): parameter for parameter in shared_parameters(network).values()}
    wanted = {id(tensor): tensor for tensor in _tensors(network) if id(tensor) not in base}
    moved = move_tensors({str(key): tensor for key, tensor in wanted.items()}, device)
    new: dict[int, Tensor] = dict(base)
    for key, tensor in wanted.items():
        found = moved[str(key)]
        new[key] = nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
        if key in shared:
            base[key] = new[key]  # type: ignore[assignment]  # a parameter
    for module in network.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None:
                    held[name] = new[id(value)]  # type: ignore[assignment]  # a parameter for a parameter
    return network


def _loads_all(network: nn.Module) -> bool:
    """Tell whether a network surely takes all values that it is told to load."""
    if info_of(network).packing:  # it may not give all values
        return False
    torchs = all(type(each)._load_from_state_dict.__module__.startswith("torch.") for each in network.modules())
    return torchs and not any(each._load_state_dict_pre_hooks for each in network.modules())


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
        self.graphs: dict[Hashable, tuple[object, int]] = {}  # of networks that another runtime trains
        self._base: dict[int, nn.Parameter] = {}  # a frozen base on the device, once for all networks

    @contextmanager
    def loaded(self, spec: NetworkSpec, tensors: Tensors) -> Iterator[PreparedNetwork]:
        """Yield the network of a spec with `tensors` in it. All other values are those of a new network."""
        prepared = self._network(spec)
        if self._compiled:
            ready = self._compiled_once(spec, prepared)
        else:
            network = copy_network(prepared, without_values=tensors.keys() if _loads_all(prepared) else ())
            ready = PreparedNetwork(network, network)
        load_from_host(ready.network, tensors, self.device)
        yield ready

    def _network(self, spec: NetworkSpec) -> nn.Module:
        network = self._prepared.pop(spec, None)
        if network is None:
            network = self._build(spec)
            network = channels_last(network if self.device == CPU else _place(network, self.device, self._base))
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
            mode = "reduce-overhead" if self.device.type == "cuda" else None  # CUDA graphs: one launch for a whole pass
            self._used[spec] = PreparedNetwork(network, torch.compile(network, mode=mode), discarded=False)
        network = self._used[spec].network
        with torch.no_grad():
            for used, new in zip(_tensors(network), _tensors(prepared), strict=True):
                used.copy_(new)
                used.requires_grad_(new.requires_grad)
                used.grad = None
        return self._used[spec]


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

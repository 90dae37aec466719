"""The networks on which one process does its tasks: built once for each name, and as good as new for each task."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.machine.device import CPU
from fedhm.networks.exchange import Tensors, exchanged, fill, unpacked
from fedhm.work.memory_format import channels_last
from fedhm.work.snapshot import OpaqueError, Snapshot

MOST = 16  # networks at a time; methods name fewer


@dataclass
class Ready:
    """A network that is prepared for training."""

    network: nn.Module
    forward: Callable[[Tensor], Tensor]  # the network, perhaps compiled
    state: Tensors  # its own tensors, by name
    snapshot: Snapshot | None = None  # if it is to be used again

    def targets(self, tensors: Tensors) -> list[Tensor]:
        """The network's tensors into which `tensors` are to be loaded."""
        return [self.state[name] for name in tensors if name in self.state]

    def hand_over(self, names: Iterable[str]) -> Tensors:
        """What travels of the network under these names, to keep. Whoever uses the network again has to load them."""
        trained = exchanged(self.network)
        return {name: self._given(name, trained[name]) for name in names}

    def _given(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself where a copy would be just like it, and other memory for the network in its place."""
        own = self.state.get(name)
        # those of four dimensions may lie in channels-last memory, and others may be made up for the way
        if own is None or tensor.ndim == 4 or not tensor.is_contiguous() or tensor.data_ptr() != own.data_ptr():
            return _copy(tensor)
        if tensor.device != CPU or self.snapshot is None or not self.snapshot.alone(own):
            return _copy(tensor)
        own.data = torch.empty_like(own)
        return tensor


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to(CPU, copy=True, memory_format=torch.contiguous_format)


class Networks:
    """`build` makes a new network by its name; what comes of a task must not depend on the tasks before it.

    Of a network that waits for its next task little is remembered beside the network itself: the values of tensors that
    tasks do not bring. One that holds what cannot be restored is built anew for every task.
    """

    def __init__(
        self, build: Callable[[str], nn.Module], device: torch.device = CPU, compiled: bool = False, most: int = MOST
    ) -> None:
        self.device = device
        self._build, self._compiled, self._most = build, compiled, most
        self._idle: dict[str, Ready] = {}  # the one that was used last comes last

    @contextmanager
    def loaded(self, name: str, tensors: Tensors) -> Iterator[Ready]:
        """For one task, the network of this name with `tensors` in it. What they leave out is as in a new network."""
        ready = self._renewed(name, tensors) or self._new(name, tensors)
        yield ready
        if ready.snapshot is not None:  # and the task went well
            self._idle[name] = ready
            while len(self._idle) > self._most:
                del self._idle[next(iter(self._idle))]

    def _renewed(self, name: str, tensors: Tensors) -> Ready | None:
        ready = self._idle.pop(name, None)
        if ready is None or ready.snapshot is None:
            return None
        held = unpacked(ready.network, tensors)
        if not ready.snapshot.restore(ready.targets(held)):
            return None
        fill(ready.network, held)
        return ready

    def _new(self, name: str, tensors: Tensors) -> Ready:
        network = channels_last(self._build(name).to(self.device))
        state = {n: t for n, t in network.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        ready = Ready(network, torch.compile(network) if self._compiled else network, state)
        held = unpacked(network, tensors)
        with suppress(OpaqueError):
            ready.snapshot = Snapshot(network, ready.targets(held))
        fill(network, held)
        return ready


def check_compiler(device: torch.device) -> None:
    """Raises where `torch.compile` does not work, as without a C++ compiler."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3, device=device))
    except Exception as error:  # whatever the compiler raises
        raise FedhmError(
            f"engine.compile = true, but torch.compile does not work here: {str(error).partition(chr(10))[0]}"
        ) from error

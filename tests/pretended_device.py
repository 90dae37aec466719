"""A device that is pretended in Python, so that device code is tested where there is no accelerator.

A tensor on `pretend:N` is a wrapper around a CPU tensor. Every operation on it is done on the CPU, so numbers are those
of the CPU. What a real device refuses is refused: an operation on tensors of several devices. What costs time there is
counted: copies between host and device, and synchronisations, in which the host waits for a result.

It has streams in so far as order goes: a tensor that was made on one stream is refused on another, unless that stream
has waited for it and its memory is recorded there. Memory can be counted, and limited: `memory_limit`.

It shows placement, copies, synchronisations, order on streams and equality of numbers. It shows nothing of a real
device's kernels, of work that overlaps, of how much memory its own libraries take, or of its number formats.
"""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
DEVICES = 2
aten = torch.ops.aten


@dataclass
class Counts:
    """What a real device would spend time on."""

    to_device: int = 0
    to_host: int = 0
    synchronisations: int = 0  # a copy to the host is one, too
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    operations: int = 0


_counting = [Counts()]  # the last one counts


@contextmanager
def counted() -> Iterator[Counts]:
    """Yield what happens on all pretended devices meanwhile."""
    _counting.append(Counts())
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


@dataclass(eq=False)
class Stream:
    """A queue of work. `done` counts its operations, and `seen` how many of another stream's it has waited for."""

    device: torch.device | None = None
    done: int = 0
    seen: dict["Stream", int] = field(default_factory=dict)

    def record_event(self) -> tuple["Stream", int]:
        return self, self.done

    def wait_event(self, event: tuple["Stream", int]) -> None:
        self.seen[event[0]] = max(event[1], self.seen.get(event[0], 0))


_streams = [Stream()]  # the last one is the current


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


@dataclass
class Memory:
    """The bytes of tensors on all pretended devices, which must not be more than `most` but in backward passes."""

    most: float
    used: int = 0
    peak: int = 0  # outside of backward passes: what `most` must be at least
    highest: int = 0  # in backward passes, too, since this was last reset
    users: dict[int, int] = field(default_factory=dict)  # of a storage by its address: tensors that look into it

    def take(self, tensor: "DeviceTensor") -> None:
        storage = tensor.held.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self.users:
            # an error of Python's in a thread of torch's backward pass aborts the process
            in_backward = isinstance(threading.current_thread(), threading._DummyThread)
            if self.used + size > self.most and not in_backward:
                raise torch.OutOfMemoryError(f"pretended device out of memory. Tried to allocate {size} bytes.")
            self.used += size
            self.peak = self.peak if in_backward else max(self.peak, self.used)
            self.highest = max(self.highest, self.used)
        self.users[address] = self.users.get(address, 0) + 1
        weakref.finalize(tensor, self.release, address, size)

    def release(self, address: int, size: int) -> None:
        self.users[address] -= 1
        if not self.users[address]:
            del self.users[address]
            self.used -= size


_memory: list[Memory] = []  # the last one counts


@contextmanager
def memory_limit(most: float = float("inf")) -> Iterator[Memory]:
    """Count the bytes of tensors that are made meanwhile, and refuse more than `most`."""
    _memory.append(Memory(most))
    try:
        yield _memory[-1]
    finally:
        _memory.pop()


def memory_allocated(_: object = None) -> int:
    return _memory[-1].used if _memory else 0


def max_memory_allocated(_: object = None) -> int:
    return _memory[-1].highest if _memory else 0


def reset_peak_memory_stats(_: object = None) -> None:
    for memory in _memory[-1:]:
        memory.highest = memory.used


def _device(index: int | None) -> torch.device:
    return torch.device(NAME, index or 0)


class DeviceTensor(Tensor):
    """A tensor on the pretended device."""

    held: Tensor
    place: torch.device
    stream: Stream  # on which it was made, as its operation of this number
    number: int
    recorded: set[Stream]  # other streams that may use its memory

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "DeviceTensor":
        wrapper: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=_device(0),  # torch's backward pass knows one pretended device only
            requires_grad=False,
        )
        wrapper.held, wrapper.place = held, device
        wrapper.stream, wrapper.recorded = _streams[-1], set()
        wrapper.stream.done += 1
        wrapper.number = wrapper.stream.done
        if _memory:
            _memory[-1].take(wrapper)
        return wrapper

    @property  # type: ignore[misc]  # torch's own is an attribute
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place

    def record_stream(self, stream: Any) -> None:
        self.recorded.add(stream)

    def check_order(self) -> None:
        """Raise if the current stream must not use this tensor yet."""
        current = _streams[-1]
        if current is self.stream:
            return
        if current.seen.get(self.stream, 0) < self.number:
            raise RuntimeError("a stream uses a tensor of another stream without waiting for it")
        if current not in self.recorded:
            raise RuntimeError("a stream uses a tensor of another stream that is not recorded there")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.held!r}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        if id(self) not in memo:
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if self._is_parameter else copied
        found: DeviceTensor = memo[id(self)]
        return found

    @property
    def _is_parameter(self) -> bool:
        return isinstance(self, torch.nn.Parameter)

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return dispatch(operation, args, dict(kwargs or {}))


def dispatch(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on the CPU, and wrap its results."""
    counts, flat = _counting[-1], pytree.tree_leaves((args, kwargs))
    wrapped = [each for each in flat if isinstance(each, DeviceTensor)]
    plain = [each for each in flat if isinstance(each, Tensor) and not isinstance(each, DeviceTensor)]
    target = kwargs.get("device")
    target = torch.device(target) if target is not None else None
    copies = operation in (aten._to_copy.default, aten.copy_.default)
    if not copies:
        places = {each.device for each in wrapped} | {each.device for each in plain if each.ndim}
        if wrapped and len(places) > 1:
            raise RuntimeError(f"{operation} got tensors on several devices: {sorted(map(str, places))}")
    for each in wrapped:
        each.check_order()
    counts.operations += 1
    if operation is aten._local_scalar_dense.default:
        counts.synchronisations += 1
    if operation is aten.copy_.default:
        return _copy(*args, **kwargs)
    if target is not None and target.type == NAME:
        place: torch.device | None = _device(target.index)
    elif target is not None:
        place = None
    else:
        place = wrapped[0].device if wrapped else None
    if operation is aten._to_copy.default:
        _count(args[0], place)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu") if target is None or target.type == NAME else target
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    args, kwargs = pytree.tree_map_only(DeviceTensor, lambda each: each.held, (args, kwargs))
    result = operation(*args, **kwargs)
    return _wrapped(result, place, wrapped)


def _wrapped(result: Any, place: torch.device | None, given: Sequence[DeviceTensor]) -> Any:
    """Wrap results; an operation in place returns the wrapper that was passed in."""
    known = {id(each.held): each for each in given}

    def wrap(tensor: Tensor) -> Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        return tensor if place is None else DeviceTensor(tensor, place)

    return pytree.tree_map_only(Tensor, wrap, result)


def _copy(target: Tensor, source: Tensor, _: bool = False) -> Tensor:
    on_target = isinstance(target, DeviceTensor)
    _count(source, target.device if on_target else None)
    (target.held if on_target else target).copy_(source.held if isinstance(source, DeviceTensor) else source)
    return target


def _count(source: Tensor, place: torch.device | None) -> None:
    """Count a copy if it crosses between host and device. One number is copied with the launch of its operation."""
    counts, size = _counting[-1], source.numel() * source.element_size()
    if place is not None and not isinstance(source, DeviceTensor):
        counts.to_device += 1
        counts.bytes_to_device += size
    elif place is None and isinstance(source, DeviceTensor):
        counts.to_host += 1
        counts.synchronisations += 1
        counts.bytes_to_host += size


def _fallback(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatch(operation, args, kwargs)


_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make the device known to torch, once in a process."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(rename=NAME)
    module = torch.get_device_module(NAME)
    module.device_count = lambda: DEVICES
    module.Stream, module.stream, module.current_stream = Stream, on_stream, lambda _=None: _streams[-1]
    module.memory_allocated, module.max_memory_allocated = memory_allocated, max_memory_allocated
    module.reset_peak_memory_stats = reset_peak_memory_stats
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # autocast is there, but casts nothing
    operations = torch.library.Library("_", "IMPL", "PrivateUse1")
    operations.fallback(_fallback)
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)
    _libraries.extend([operations, autocast])

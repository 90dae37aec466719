"""Whatever is put into shared memory is found there again, bit for bit, also by another process."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhm.engines.workers import ALIGNMENT, SharedMemory

TYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip
shapes = st.lists(st.integers(0, 5), max_size=4)


def random_bits(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bits, NaN among them; but a bool is 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    drawn = torch.randint(0, high, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return drawn.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().flatten().view(torch.uint8).tolist()
    return values


@given(st.lists(st.tuples(st.sampled_from(TYPES), shapes, st.integers(0, 9)), max_size=6))
def test_tensors_come_back_as_they_were(kinds: list[tuple[torch.dtype, list[int], int]]) -> None:
    memory = SharedMemory()
    tensors = [random_bits(*kind) for kind in kinds]
    places = [memory.put(tensor) for tensor in tensors]
    for tensor, place in zip(tensors, places, strict=True):
        found = memory.get(place)
        assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor))
        assert place[0] % ALIGNMENT == 0
        assert not tensor.numel() or found.data_ptr() % ALIGNMENT == 0
    memory.close()


def test_layouts_and_gradients_stay_behind() -> None:
    memory = SharedMemory()
    for tensor in (torch.rand(6, 4).t(), torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
                   torch.rand(8, 8)[:, :3], torch.ones(3).expand(5, 3), torch.rand(4, requires_grad=True)):  # fmt: skip
        found = memory.get(memory.put(tensor))
        assert torch.equal(found, tensor)
        assert found.is_contiguous()
        assert not found.requires_grad
    memory.close()


def test_what_lies_there_stays_while_the_memory_grows() -> None:
    memory = SharedMemory()
    first = memory.get(memory.put(torch.arange(1000)))
    place = memory.put(torch.rand(1000, 1000))
    assert torch.equal(first, torch.arange(1000))
    first += 1  # an older mapping, the same memory
    assert torch.equal(memory.get((0, "int64", [1000])), torch.arange(1, 1001))
    found = memory.get(place)
    memory.close()
    assert found.sum() > 0


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_another_process_sees_it_and_can_make_it_larger(size: int) -> None:
    memory = SharedMemory()
    memory.put(torch.arange(3))
    pid = os.fork()
    if pid == 0:
        try:
            memory.put(memory.get((0, "int64", [3])).repeat(size))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert torch.equal(memory.get((ALIGNMENT, "int64", [3 * size])), torch.arange(3).repeat(size))
    memory.close()


def test_without_anonymous_memory_there_is_a_nameless_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    memory = SharedMemory()
    assert torch.equal(memory.get(memory.put(torch.arange(100_000))), torch.arange(100_000))
    memory.close()

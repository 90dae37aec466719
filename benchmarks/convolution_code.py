"""The memory that convolutions keep after they ran: the code that oneDNN generates for every different one.

`training_memory` counts it (`fedhm/measure/cost.py`). Each row is a convolution that had not run before in this
process, with everything freed before and after; sizes are (in, out, kernel, image, batch, stride).
"""

import ctypes
import gc
import itertools
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from fedhm.machine.process import return_freed_memory
from measure import Ratio, arguments, machine, save_json, show

FIRST = (16, 16, (3, 3), 8, 4, 1)  # loads what is loaded once
CASES = [
    (64, 64, (3, 3), 32, 64, 1),
    (64, 16, (3, 1), 32, 64, 1),
    (16, 64, (1, 3), 32, 64, 1),
    (128, 128, (3, 3), 16, 64, 1),
    (256, 64, (3, 1), 8, 64, 1),
    (512, 512, (3, 3), 4, 64, 1),
    (8, 8, (3, 3), 16, 50, 1),
    (64, 64, (3, 3), 32, 8, 1),
    (64, 128, (3, 3), 32, 64, 2),
    (64, 128, (1, 1), 32, 64, 2),
    (8, 16, (3, 3), 16, 50, 2),
]
PARTS = ["forward", "gradient of inputs", "gradient of weights"]


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


def kept(inputs: int, outputs: int, kernel: tuple[int, int], size: int, batch: int, stride: int) -> list[int]:
    """Return the bytes that are left behind by each of the three parts."""
    x, w = torch.randn(batch, inputs, size, size), torch.randn(outputs, inputs, *kernel)
    x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    padding = [each // 2 for each in kernel]
    sizes = [resident()]
    y = F.conv2d(x, w, stride=stride, padding=padding)
    del y
    sizes.append(resident())
    g = torch.ones_like(F.conv2d(x, w, stride=stride, padding=padding))
    grown = resident() - sizes[-1]  # by the gradient itself
    for mask in ([True, False, False], [False, True, False]):
        shape = ([stride] * 2, padding, [1, 1], False, [0, 0], 1, mask)
        found = torch.ops.aten.convolution_backward(g, x, w, None, *shape)
        del found
        sizes.append(resident() - grown)
    return [after - before for before, after in itertools.pairwise(sizes)]


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    return_freed_memory()
    kept(*FIRST)
    cases = [(8, 8, (3, 3), 16, 50, 1), (8, 16, (3, 3), 16, 50, 2)] if options.quick else CASES
    found = {case: kept(*case) for case in cases}
    rows = [[str(case), *(f"{part / 1e3:.0f}" for part in parts)] for case, parts in found.items()]
    show(f"kB that convolutions keep; {machine()}", ["convolution", *PARTS], rows)
    plain = [parts for case, parts in found.items() if case[-1] == 1]
    medians = {name: statistics.median(parts[number] for parts in plain) for number, name in enumerate(PARTS)}
    save_json(options.json, {"kept": {name: Ratio(*[max(1.0, size)] * 3) for name, size in medians.items()}})


if __name__ == "__main__":
    main()

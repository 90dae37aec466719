"""A process that trains a few steps, and prints the seconds of a step and the peak of the memory that this added.

python -m fedhm.export.training_peak executorch|torch MANIFEST.json NETWORK.pt2

Inputs are zeros: the time of a step does not depend on them. PyTorch's step runs the same graph by autograd.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedhm.export.peak import STATUS, peak_bytes
from fedhm.machine.device import set_threads
from fedhm.ondevice.executorch import LoadedGraph, make_optimizer, quiet

STEPS, WARM_UP = 15, 3


def main() -> None:
    runtime, manifest_path, network = sys.argv[1:]
    manifest = json.loads(Path(manifest_path).read_text(encoding="utf-8"))
    set_threads(1)
    rows = manifest["rows"]
    inputs, targets = (
        torch.zeros(rows, *manifest[name]["shape"], dtype=getattr(torch, manifest[name]["dtype"]))
        for name in ("inputs", "targets")
    )
    bases = [torch.zeros(shape) for shape in manifest["bases"].values()]
    given = [inputs, targets, torch.ones(rows), torch.ones(manifest["outputs"]), *bases]
    with quiet():
        import executorch.extension.training  # noqa: F401
    gc.collect()
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak of the imports
        before = peak_bytes("VmRSS")
    if runtime == "executorch":
        step = _executorch_step(Path(manifest_path).with_name(manifest["file"]), given, manifest)
    else:
        step = _torch_step(network, given, manifest)
    spent = []
    for _ in range(STEPS + WARM_UP):
        start = time.process_time()
        step()
        spent.append(time.process_time() - start)
    peak = max(0, peak_bytes("VmHWM") - before) if STATUS.exists() else None
    print(json.dumps([statistics.median(spent[WARM_UP:]), peak]))


def _executorch_step(path: Path, given: list[torch.Tensor], manifest: dict[str, float]) -> Callable[[], None]:
    loaded = LoadedGraph(path.read_bytes())
    loaded.step(given)
    optimizer = make_optimizer(loaded.parameters, 1e-3, manifest["momentum"], 0.0, 0.0, False)

    def step() -> None:
        loaded.step(given)
        optimizer.step(loaded.gradients)

    return step


def _torch_step(network: str, given: list[torch.Tensor], manifest: dict[str, float]) -> Callable[[], None]:
    module = torch.export.load(network).module(check_guards=False)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, manifest["momentum"])

    def step() -> None:
        optimizer.zero_grad()
        module(*given)[0].backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()

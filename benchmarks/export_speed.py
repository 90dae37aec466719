"""How much of a tier's saving in MACs arrives as time of its exported network, by ONNX Runtime on one thread.

Weights are random, which does not change the time. One image at a time, all tiers in turn, in processor time:
on one thread that is what a call takes where nobody else wants the processor.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedhm import load_config
from fedhm import measure as cost_of
from fedhm.assembly import named_design
from fedhm.data.samples import Preprocessing
from fedhm.export.formats import FORMATS
from fedhm.export.source import ExportSource
from fedhm.export.write import write
from fedhm.networks.inputs import require_tensor
from measure import arguments, interleaved, machine, median, ratio, save_json, show


def main() -> None:
    options = arguments(__doc__, preset=("cifar10-resnet18", "whose tiers"), repeats=(60, "turns"))
    design = named_design(load_config("digits" if options.quick else options.preset))
    shape = tuple(require_tensor(design.sample, "this benchmark").shape[1:])
    images = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    preprocessing = Preprocessing((0.5,) * shape[0], (0.25,) * shape[0])
    tiers = [design.method.tiers[0], design.method.tiers[-1]] if options.quick else list(design.method.tiers)
    macs: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for tier in tiers:
            torch.manual_seed(0)
            network = design.method.network(design.method.spec(tier))
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    nn.init.kaiming_normal_(parameter)
            macs[tier] = cost_of(network, shape).macs
            file = write(ExportSource(network, tier, images, True, preprocessing), "onnx", Path(folder))
            cases[tier] = partial(FORMATS["onnx"].load(file.path, threads=1), images[:1])
        times = interleaved(cases, 5 if options.quick else options.repeats, warmup=3, clock=time.process_time)
    largest = tiers[0]
    faster = {tier: ratio(times[tier], times[largest]) for tier in tiers}
    promised = {tier: macs[largest] / macs[tier] for tier in tiers}
    rows = [
        (tier, f"{macs[tier] / 1e6:.1f} M", f"{1e3 * median(times[tier]):.2f} ms", promised[tier], faster[tier],
         faster[tier].median / promised[tier])
        for tier in tiers
    ]  # fmt: skip
    show(machine(), ("tier", "MACs", "latency", "MACs saved", "times as fast", "of what MACs promise"), rows)
    save_json(options.json, {"tiers": faster, "macs": promised})


if __name__ == "__main__":
    main()

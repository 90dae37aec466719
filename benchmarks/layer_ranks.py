"""Rank by layer against one ratio for all layers at the same parameters, on a trained model, before any fine-tuning.

    fedhm run cifar10-tiers --set method.name=fedavg --out runs/full
    python benchmarks/layer_ranks.py --run runs/full

The error is that of all factorized layers together, ‖W − W_r‖ / ‖W‖. BatchNorm statistics are those of the truncated
network on training samples, as clients gather them for an evaluation.
"""

import sys
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

import fedhm
from fedhm.assembly import read_federation
from fedhm.data.samples import Feed
from fedhm.errors import FedhmError
from fedhm.measure.cost import measure
from fedhm.models.build import build_model
from fedhm.networks.batchnorm import tracked_layers
from fedhm.networks.inputs import require_tensor
from fedhm.runs.folder import read_config
from fedhm.runs.models import load_tier, tier_file
from measure import Ratio, arguments, save_json, show

RATIOS = ("1/2", "1/4", "1/8")
HEADINGS = ["ratio", "plan", "parameters", "error", "accuracy", "ranks"]


def error(model: nn.Module, network: nn.Module, layers: list[str]) -> float:
    full, found = model.state_dict(), fedhm.to_full(network)
    lost = sum(float((found[f"{name}.weight"] - full[f"{name}.weight"]).square().sum()) for name in layers)
    return float((lost / sum(float(full[f"{name}.weight"].square().sum()) for name in layers)) ** 0.5)


@torch.no_grad()
def accuracy(network: nn.Module, known: Tensor, test: tuple[Tensor, Tensor]) -> float:
    network = deepcopy(network).train()
    for layer in tracked_layers(network).values():
        layer.momentum = None
        layer.reset_running_stats()
    network(known)
    hits = (network.eval()(test[0]).argmax(1) == test[1]).double()
    return float(hits.mean())


def main() -> None:
    options = arguments(__doc__, run=("", "the folder of a finished run"), samples=(5000, "to test on"))
    if options.run:
        config = read_config(Path(options.run))
        federation = read_federation(config)
        model = build_model(config, federation.input_shape, federation.classes)
        model = load_tier(tier_file(Path(options.run) / "models", "full"), model)
    else:  # to see that it works
        few = fedhm.load_config("digits", ["federation.clients=4", "train.rounds=1", "method.name=fedavg"])
        federation, result = read_federation(few), fedhm.prepare(few).run()
        model = result.networks["full"]
    samples = 200 if options.quick else options.samples
    known = require_tensor(
        next(Feed(federation.clients[0], federation.preprocessing).ordered(samples))[0], "this benchmark"
    )
    if federation.test is None:
        raise FedhmError("this run has no test set")
    images, labels = next(Feed(federation.test, federation.preprocessing).ordered(samples))
    test = require_tensor(images, "this benchmark"), labels
    layers = list(fedhm.plan_ranks(model, "1/8"))
    rows, ratios = [], {}
    print(f"full: accuracy {accuracy(model, known, test):.3f}", file=sys.stderr)
    for ratio in RATIOS:
        uniform = fedhm.plan_ranks(model, ratio)
        size = measure(fedhm.to_hybrid(model, uniform), federation.input_shape).parameters
        by_layer = fedhm.fit(model, federation.input_shape, parameters=size).plan
        for name, plan in (("one ratio", uniform), ("by layer", by_layer)):
            network = fedhm.to_hybrid(model, plan)
            found = error(model, network, layers), accuracy(network, known, test)
            parameters = measure(network, federation.input_shape).parameters
            ranks = " ".join(str(plan.get(layer, "dense")) for layer in layers)
            rows.append([ratio, name, f"{parameters:,}", f"{found[0]:.3f}", f"{100 * found[1]:.1f} %", ranks])
            ratios[f"{ratio}, {name}"] = Ratio(*[found[0]] * 3)
    show(
        f"truncation of {options.run or 'digits'}", ["ratio", "ranks", "parameters", "error", "accuracy", "ranks"], rows
    )
    save_json(options.json, {"error": ratios})


if __name__ == "__main__":
    main()

"""The #Params column of the paper's tables, for every method and tier, in millions, of what `fedhm compare` runs."""

import pytest
import torch
from torch import nn

from fedhm.compare.select import Reference, resolve_entries
from fedhm.config.loading import load_config, parse
from fedhm.lowrank.plan import find_classifier
from fedhm.methods.method import Setup
from fedhm.models.build import build_model

# preset → method → a number for each tier, with the number of levels that share it
TABLE: dict[str, dict[str, list[tuple[float, int]]]] = {
    "cifar10-resnet18": {
        "fedhm": [(11.17, 1), (4.16, 1), (2.21, 1), (1.24, 1)],
        "fedhm-v2": [(4.16, 2), (2.21, 1), (1.24, 1)],
        "fedhm-v3": [(2.21, 3), (1.24, 1)],
        "heterofl": [(11.17, 1), (4.29, 1), (2.80, 1), (1.37, 1)],
        "heterofl-v2": [(4.29, 2), (2.80, 1), (1.37, 1)],
        "heterofl-v3": [(2.80, 3), (1.37, 1)],
        "fedavg": [(11.17, 1)],  # the first row of the homogeneous table
        "lowrank": [(4.16, 1), (2.21, 1), (1.24, 1)],
        "slimmed": [(4.29, 1), (2.80, 1), (1.37, 1)],  # the last is the paper's FedAvg
        # 9 × 1.373: the paper multiplies the rounded 1.37, which gives 12.33
        "splitmix": [(12.36, 1), (4.12, 1), (2.75, 1), (1.37, 1)],
    },
    "cifar100-resnet34": {
        "fedhm": [(21.33, 1), (8.40, 1), (4.99, 1), (3.27, 1)],
        "heterofl": [(21.33, 1), (8.77, 1), (5.35, 1), (3.42, 1)],
        "heterofl-v2": [(8.77, 2), (5.35, 1), (3.42, 1)],
        "heterofl-v3": [(5.35, 3), (3.42, 1)],
        "fedavg": [(21.33, 1)],
        "lowrank": [(8.40, 1), (4.99, 1), (3.27, 1)],
        "slimmed": [(8.77, 1), (5.35, 1), (3.42, 1)],
        # the paper's 10.22 and 6.81 do not go with its 3.42 and 23.97
        "splitmix": [(23.97, 1), (10.27, 1), (6.85, 1), (3.42, 1)],
    },
    "tinyimagenet-resnet34": {
        "fedhm": [(21.38, 1), (8.45, 1), (5.04, 1), (3.33, 1)],
        "heterofl": [(21.38, 1), (8.80, 1), (5.38, 1), (3.44, 1)],
        "heterofl-v2": [(8.80, 2), (5.38, 1), (3.44, 1)],
        "heterofl-v3": [(5.38, 3), (3.44, 1)],
        "fedavg": [(21.38, 1)],
        "lowrank": [(8.45, 1), (5.04, 1), (3.33, 1)],
        "slimmed": [(8.80, 1), (5.38, 1), (3.44, 1)],
        "splitmix": [(24.11, 1), (10.33, 1), (6.89, 1), (3.44, 1)],
    },
}


def parameters(network: nn.Module) -> float:
    return sum(p.numel() for p in network.parameters() if p.requires_grad) / 1e6


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    classes = {"cifar10-resnet18": 10, "cifar100-resnet34": 100, "tinyimagenet-resnet34": 200}
    return {preset: build_model(load_config(preset), (3, 32, 32), count) for preset, count in classes.items()}


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {preset: Reference(load_config(preset)) for preset in TABLE}


@pytest.mark.parametrize(
    ("preset", "method"), [(preset, method) for preset, table in TABLE.items() for method in table]
)
def test_sizes_are_the_papers(
    preset: str, method: str, models: dict[str, nn.Module], references: dict[str, Reference]
) -> None:
    model = models[preset]
    setup = Setup(find_classifier(model), torch.zeros(1, 3, 16, 16))
    found: list[tuple[float, int]] = []
    for entry in resolve_entries([method], references[preset]):  # a family has one for each size
        built = parse({"method": entry.method}, "test").method.build(model, setup)
        found += [(parameters(built.network(built.spec(tier))), list(built.levels).count(tier)) for tier in built.tiers]
    expected = TABLE[preset][method]
    assert [share for _, share in found] == [share for _, share in expected]
    for (size, _), (paper, _) in zip(found, expected, strict=True):
        assert size == pytest.approx(paper, abs=0.0085)  # the paper rounds some down

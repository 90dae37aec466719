"""A method of one's own, outside the package: FedAvg that takes the median of the clients' weights, not their mean.

    fedhm.run(model, clients, test, method=FedMedian())

To be found by its name (`method.name = "fedmedian"` in a config, `fedhm compare --methods fedmedian`, and by the nodes
of a Flower federation), an installed package names it in its pyproject.toml:

    [project.entry-points."fedhm.methods"]
    fedmedian = "own_method:FedMedian"
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import nn

import fedhm


class FedMedian(fedhm.MethodConfig):
    """The settings: `strength` of the step from the old weights to the median."""

    name: Literal["fedmedian"] = "fedmedian"
    strength: float = 1.0

    def build(self, model: nn.Module, setup: object) -> "Median":
        return Median(self, model)


class Median(fedhm.Method[fedhm.ModelState]):
    """The running method: one tier, the full model. Medians need all updates at once, so memory grows with them."""

    tiers = levels = ("full",)

    def __init__(self, settings: FedMedian, model: nn.Module) -> None:
        self.settings, self.model = settings, model

    def start(self, weights: fedhm.Tensors) -> fedhm.ModelState:
        return fedhm.ModelState(weights)

    def tasks(
        self, state: fedhm.ModelState, participants: Sequence[fedhm.Participant], round_number: int
    ) -> Iterator[fedhm.Task]:
        for p in participants:
            yield fedhm.Task("train", round_number, p.client, p.tier, self.spec("full"), state.weights)

    def merge(self, state: fedhm.ModelState, updates: Iterable[fedhm.Update], round_number: int) -> fedhm.ModelState:
        sent = [update.tensors for update in updates]
        medians = {name: torch.stack([each[name] for each in sent]).median(0).values for name in sent[0]}
        step = {name: state.weights[name].lerp(median, self.settings.strength) for name, median in medians.items()}
        return fedhm.ModelState({**state.weights, **step})

    def network(self, spec: fedhm.NetworkSpec) -> nn.Module:
        return copy.deepcopy(self.model)

    def weights(self, state: fedhm.ModelState, tier: str) -> fedhm.Tensors:
        return state.weights


def main() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    clients = [(inputs[i:1500:10], labels[i:1500:10]) for i in range(10)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    settings = {"train": {"rounds": 10, "epochs": 2, "lr": 0.1, "batch": 16}, "engine": {"threads": 1}}
    result = fedhm.run(model, clients, (inputs[1500:], labels[1500:]), settings, method=FedMedian())
    print(f"accuracy {result.metrics['full'].accuracy:.1%}")


if __name__ == "__main__":
    main()

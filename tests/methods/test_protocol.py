"""The protocol carries other kinds of methods without a special case in the loop, the client or the engine.

Two toys: one slices channels as HeteroFL does, one trains several base networks per client as Split-Mix does.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from conftest import small_config
from fedhm.assembly import assemble
from fedhm.config.method import MethodConfig
from fedhm.config.registry import known
from fedhm.data.federation import Federation
from fedhm.methods.means import WeightedMean
from fedhm.methods.method import Method, ModelState
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, Update


def slim(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(4 * width, 4)
    )


class WidthSlices(Method[ModelState]):
    """A narrow client trains the first channels; each element is averaged over those who hold it."""

    tiers = levels = ("full", "half")
    widths = {"full": 8, "half": 4}  # noqa: RUF012

    def __init__(self) -> None:
        self._shapes = {
            tier: {n: t.shape for n, t in exchanged_tensors(slim(w)).items()} for tier, w in self.widths.items()
        }

    def start(self, weights: Tensors) -> ModelState:
        return ModelState(weights)

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, NetworkSpec(p.tier), self.weights(state, p.tier))

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        sums = {name: torch.zeros_like(t) for name, t in state.weights.items()}
        counts = {name: torch.zeros_like(t) for name, t in state.weights.items()}
        for update in updates:
            for name, tensor in update.tensors.items():
                where = tuple(slice(size) for size in tensor.shape)
                sums[name][where] += tensor
                counts[name][where] += 1
        return ModelState({n: torch.where(counts[n] > 0, sums[n] / counts[n], old) for n, old in state.weights.items()})

    def network(self, spec: NetworkSpec) -> nn.Module:
        return slim(self.widths[spec.tier])

    def weights(self, state: ModelState, tier: str) -> Tensors:
        shapes = self._shapes[tier].items()
        return {n: state.weights[n][tuple(slice(s) for s in shape)].contiguous() for n, shape in shapes}


class Ensemble(nn.Module):
    def __init__(self, members: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(slim(3) for _ in range(members))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


class Mix(Method[ModelState]):
    """A tier is a number of base networks; a client gets one task for each that it can afford."""

    tiers = levels = ("3", "1")

    def start(self, weights: Tensors) -> ModelState:
        torch.manual_seed(0)
        return ModelState(
            {f"{base}/{n}": t.clone() for base in range(3) for n, t in exchanged_tensors(slim(3)).items()}
        )

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            for number in range(int(p.tier)):
                base = (p.client + number) % 3
                own = {n.removeprefix(f"{base}/"): t for n, t in state.weights.items() if n.startswith(f"{base}/")}
                yield Task("train", round_number, p.client, p.tier, NetworkSpec("base", number=base), own)

    def merge(self, state: ModelState, updates: Iterable[Update], round_number: int) -> ModelState:
        mean = WeightedMean(state.weights)
        for update in updates:
            for name, tensor in update.tensors.items():
                mean.add(f"{update.network.number}/{name}", tensor, 1.0)
        return ModelState(mean.result())

    def network(self, spec: NetworkSpec) -> nn.Module:
        return slim(3) if spec.tier == "base" else Ensemble(int(spec.tier))

    def weights(self, state: ModelState, tier: str) -> Tensors:
        named = ((n.partition("/"), t) for n, t in state.weights.items())
        return {f"members.{base}.{rest}": t for (base, _, rest), t in named if int(base) < int(tier)}


class Toy(MethodConfig):
    name: Literal["toy"] = "toy"
    mixes: bool = False

    def build(self, model: nn.Module, setup: object) -> WidthSlices | Mix:
        return Mix() if self.mixes else WidthSlices()


@pytest.mark.parametrize(("mixes", "tiers"), [(False, WidthSlices.tiers), (True, Mix.tiers)])
def test_other_methods_run_in_the_same_loop(mixes: bool, tiers: tuple[str, ...], federation: Federation) -> None:
    config = small_config(train={"rounds": 6, "epochs": 2}, evaluation={"every": 6}).model_copy(
        update={"method": Toy(mixes=mixes)}
    )
    torch.manual_seed(0)
    result = assemble(slim(8), federation, config).run()
    assert set(result.metrics) == set(tiers)
    assert all(score.accuracy > 0.6 for score in result.metrics.values())
    assert all(record.traffic for record in result.records)


def test_the_contract_of_independence_names_every_method() -> None:
    """A list that a new method is missing from would let it import another one in silence."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    contracts = {each["name"]: each for each in settings["tool"]["importlinter"]["contracts"]}
    named = {module.rpartition(".")[2] for module in contracts["methods do not know each other"]["modules"]}
    assert named == set(known("methods")) - {"toy"}

"""The largest version within budgets, trained in the cheapest way; what cannot be met is a sentence."""

import itertools
import re

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.cli import main
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.measure.cost import measure, training_memory
from fedhm.measure.fit import fit

SHAPE = (3, 8, 8)


class Residual(nn.Module):
    def __init__(self, channels: int, random: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.drop = nn.Dropout(0.5 if random else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.conv(x).relu())
        return y


def with_blocks(random: bool = False) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Residual(16, random) for _ in range(4)))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), blocks, nn.Flatten(), nn.Linear(16 * 64, 4))


def without_blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


@pytest.mark.parametrize("kind", ["parameters", "macs", "bytes"])
def test_the_largest_version_within_a_budget(kind: str) -> None:
    model = with_blocks()
    whole = getattr(measure(model, SHAPE), kind)
    found = fit(model, SHAPE, 8, **{kind: 0.8 * whole})
    network = to_hybrid(model, found.plan)
    taken = getattr(measure(network, SHAPE), kind)
    assert taken == getattr(found.expected, kind) <= 0.8 * whole
    smallest = min(found.plan, key=lambda layer: found.plan[layer])
    larger = {**found.plan, smallest: found.plan[smallest] + 1}
    assert getattr(measure(to_hybrid(model, larger), SHAPE), kind) > 0.8 * whole
    assert found.expected.memory == training_memory(network, SHAPE, 8)
    assert (found.micro_batch, found.checkpointing) == (0, False)


def test_a_budget_of_everything_is_the_full_network() -> None:
    found = fit(with_blocks(), SHAPE, 8, memory="1GB", parameters="1M")
    assert not found.plan
    assert found.kept
    assert set(found.kept.values()) == {1.0}


@pytest.mark.parametrize("random", [False, True])
def test_memory_is_saved_by_checkpointing_first_and_then_by_micro_batches(random: bool) -> None:
    model, batch = with_blocks(random), 64
    sizes = measure(model, SHAPE).parameters * 9 // 10
    plan = fit(model, SHAPE, batch, parameters=sizes).plan
    ways = [(0, False), (0, True), (16, True)]
    for micro_batch, checkpointing in ways:
        how = {"micro_batch": micro_batch, "checkpointing": checkpointing}
        memory = training_memory(to_hybrid(model, plan), SHAPE, batch, **how)
        found = fit(model, SHAPE, batch, memory=memory, parameters=sizes)
        assert (found.micro_batch, found.checkpointing) == (micro_batch, checkpointing)
        assert found.plan == plan
        assert found.expected.memory == memory


def test_a_model_without_blocks_has_micro_batches_only() -> None:
    model = without_blocks()
    found = fit(model, (64,), 1024, memory="900kB", parameters=20_000)
    assert found.micro_batch
    assert not found.checkpointing


def test_smaller_budgets_have_smaller_ranks_everywhere() -> None:
    model = without_blocks()
    plans = [fit(model, (64,), 8, parameters=size).plan for size in range(10_000, 26_000, 5_000)]
    for small, large in itertools.pairwise(plans):
        assert all(small[layer] <= large.get(layer, 1000) for layer in small)


@pytest.mark.parametrize(
    ("budgets", "sentence"),
    [
        ({}, "fit needs at least one budget: memory, bytes, macs, parameters"),
        ({"memory": "-1MB"}, "memory must be at least 1, not '-1MB'"),
        ({"bytes": "2 parsec"}, "bytes: there is no unit 'parsec'"),
        ({"parameters": 1000}, r"parameters = 1k is too little.*rank 1 in 1 layers, has .*classifier.*give at least"),
        ({"memory": "20kB"}, r"memory = 20kB is too little.*the closest, .*, takes 0\.\d+ MB for a batch of 16"),
        ({"memory": "1MB", "batch": 0}, "a batch has at least one sample, not 0"),
    ],
)
def test_what_cannot_be_met_is_a_sentence(budgets: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence) as error:
        fit(without_blocks(), (64,), **{"batch": 16, **budgets})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


class Counts(nn.Module):
    """A model that computes with the values of its inputs, which have none on torch's meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = without_blocks()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) * (1.0 if x.sum().item() < 1e9 else 2.0)
        return y


def test_a_model_that_looks_at_values_is_measured_as_it_is() -> None:
    found, plain = (fit(model, (64,), 8, memory="200kB") for model in (Counts(), without_blocks()))
    assert list(found.plan.values()) == list(plain.plan.values())


@pytest.mark.slow
def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "digits", "--parameters", "30k", "--memory", "50MB", "--seconds", "60"]) == 0
    shown = capsys.readouterr().out
    assert "energy kept" in shown
    assert "train.micro_batch = 0, train.checkpointing = false" in shown
    assert re.search(r"seconds of a step [\d.]+ here, in the fastest of 3 times 4 steps", shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "fedhm fit needs a budget: --memory, --bytes, --macs, --parameters or --seconds"),
        (["--memory", "-5MB"], "--memory must be at least 1, not '-5MB'"),
        (["--memory", "3 parsec"], "--memory: there is no unit 'parsec'"),
        (["--parameters", "100"], "parameters = 100 is too little for this model"),
        (["--seconds", "-1"], "--seconds takes a number above 0, not '-1'"),
        (["--seconds", "1e-9"], "seconds = 1e-09 is too little for a step of training here"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "digits", *arguments]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"fedhm: {sentence}")
    assert shown.count("\n") == 1


def test_it_is_part_of_the_interface() -> None:
    found = fedhm.fit(without_blocks(), (64,), memory="1MB")
    assert isinstance(found, fedhm.Fit)
    assert isinstance(found.plan, fedhm.RankPlan)

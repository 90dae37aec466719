"""The plain FedHM of examples/fedhm_plain.py and the library's agree: same start, same data, same batches."""

import copy
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forked
from fedhm import Config, Federation, Samples, assemble
from fedhm.config.section import tier_name
from fedhm.data.images import read_digits
from fedhm.data.partition import dirichlet_equal
from fedhm.data.samples import Feed, Preprocessing
from fedhm.seeds import numpy_generator, torch_generator
from fedhm.server.sampling import sample_participants

EXAMPLE = Path(__file__).parents[2] / "examples" / "fedhm_plain.py"
CLIENTS, SEED, TIERS = 8, 3, (1.0, 1 / 2, 1 / 4, 1 / 8)

# Both sides compute in float64 but sum in different orders: 2⁻⁵³ ≈ 1e-16 for each operation, made larger by eight
# steps with momentum per round and by every decomposition, in inverse proportion to the gap between the last singular
# value kept and the first one cut off. Measured is below 1e-15 on weights of about 1; three digits are left for other
# machines. A wrong rule is seen above 1e-2, an αₚ rounded to float32 at 1e-7.
TOLERANCE = 1e-12


def _load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fedhm_plain", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fedhm_plain"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


plain = _load_example()


class Residual(nn.Module):
    """BatchNorm, a stride, a bias behind factors, a 1×1 shortcut, and a square Linear that γ = 1/2 leaves dense."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.shortcut = nn.Conv2d(8, 16, 1, 2)
        self.norm2 = nn.BatchNorm2d(16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(self.norm2(self.block(x) + self.shortcut(x)))
        x = F.relu(self.hidden(x.mean((2, 3))))
        logits: Tensor = self.head(x)
        return logits


@pytest.fixture(scope="module")
def digits() -> Federation:
    """A part of the digits in float64, dealt out so unevenly that no client holds every label."""
    source = read_digits()
    rng = numpy_generator(SEED, "partition")
    parts = dirichlet_equal(source.train.labels[:400].numpy(), CLIENTS, 0.3, rng)
    train, test = (Samples(s.inputs.double() / 255, s.labels) for s in (source.train, source.test))
    clients = [train.subset(torch.from_numpy(part)) for part in parts]
    return Federation(clients, test, source.classes, Preprocessing())


def _config(
    weighting: str,
    heterogeneity: str,
    aggregate: str = "models",
    evaluate_every: int = 1,
    dense: Sequence[str] = ("shortcut",),  # as in the paper, whose 1×1 convolutions stay dense
) -> Config:
    return Config.model_validate(
        {
            "seed": SEED,
            "federation": {"clients": CLIENTS, "participation": 0.5, "heterogeneity": heterogeneity},
            "train": {
                "rounds": 5,
                "epochs": 2,
                "batch": 16,
                "lr": 0.05,
                "weight_decay": 0.01,
                "frobenius_decay": 0.02,
                "nested": 0,
            },
            "method": {
                "name": "fedhm",
                "tiers": TIERS,
                "keep": 1,
                "dense": dense,
                "weighting": weighting,
                "temperature": 0.5,
                "aggregate": aggregate,
                "start": "whole",
            },
            "evaluation": {"every": evaluate_every},
            "engine": {"threads": 1},
        }
    )


def _settings(config: Config) -> object:
    return plain.Settings(
        lr=config.train.lr,
        momentum=config.train.momentum,
        weight_decay=config.train.weight_decay,
        frobenius_decay=config.train.frobenius_decay,
        keep=config.method.keep,
        temperature=config.method.temperature if config.method.weighting == "softmax" else math.inf,
        bands=config.method.aggregate == "bands",
        band_speed=config.method.band_speed,
    )


def _held(federation: Federation) -> Tensor:
    return torch.stack([torch.bincount(s.labels, minlength=federation.classes) > 0 for s in federation.clients])


def _rounds(
    model: nn.Module, federation: Federation, config: Config, settings: object, held: Tensor
) -> Iterator[nn.Module]:
    """The server's model after every round of the plain procedure, which draws as the library does."""
    ratio_of = {tier_name(ratio): ratio for ratio in TIERS}
    model = copy.deepcopy(model)
    for number in range(1, config.train.rounds + 1):

        def batches(client: int, ratio: float, number: int = number) -> Iterator[tuple[Tensor, Tensor]]:
            feed = Feed(federation.clients[client], federation.preprocessing)
            generator = torch_generator(SEED, "batches", number, client, tier_name(ratio))
            for _ in range(config.train.epochs):
                yield from feed.shuffled(config.train.batch, generator)

        chosen = next(sample_participants(config.federation, CLIENTS, list(ratio_of), SEED, number))
        plain.one_round(model, [(p.client, ratio_of[p.tier]) for p in chosen], batches, held, settings)
        yield model


def _difference(first: nn.Module, second: nn.Module) -> float:
    """The largest of any weight; BatchNorm statistics are no weights, and the plain procedure gathers none."""
    ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def _seeded(make: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return make().double()


@pytest.mark.parametrize("weighting", ["uniform", "softmax"])
@pytest.mark.parametrize("heterogeneity", ["fixed", "dynamic"])
@pytest.mark.parametrize("aggregate", ["models", "bands"])
def test_library_gives_the_plain_result(digits: Federation, weighting: str, heterogeneity: str, aggregate: str) -> None:
    model, config = _seeded(Residual), _config(weighting, heterogeneity, aggregate, evaluate_every=5)
    result = assemble(model, digits, config).run()
    *_, final = _rounds(model, digits, config, _settings(config), _held(digits))
    assert _difference(final, model) > 0.1  # it has moved
    assert _difference(final, result.networks["full"]) < TOLERANCE


@pytest.mark.slow
def test_every_tier_scores_as_in_the_library(digits: Federation) -> None:
    model, config = _seeded(plain.small_network), _config("softmax", "fixed", dense=())
    result = assemble(model, digits, config).run()
    inputs, labels = digits.test.inputs, digits.test.labels
    for record, server in zip(
        result.records, _rounds(model, digits, config, _settings(config), _held(digits)), strict=True
    ):
        for ratio in TIERS:
            with torch.no_grad():
                logits = plain.hybrid_network(server, ratio, config.method.keep).eval()(inputs)
            score = record.metrics[tier_name(ratio)]
            assert score.accuracy == (logits.argmax(1) == labels).double().mean().item()
            assert score.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=TOLERANCE)


CHANGES = {
    "frobenius_decay": 0.0,
    "weight_decay": 0.0,
    "temperature": math.inf,
    "keep": 2,
    "momentum": 0.8,
    "bands": True,
}


@pytest.fixture(scope="module")
def right(digits: Federation) -> nn.Module:
    config = _config("softmax", "fixed")
    *_, final = _rounds(_seeded(Residual), digits, config, _settings(config), _held(digits))
    return final


@pytest.mark.parametrize("changed", [*CHANGES, "masks"])
def test_the_comparison_sees_every_rule(digits: Federation, right: nn.Module, changed: str) -> None:
    model, config, held = _seeded(Residual), _config("softmax", "fixed"), _held(digits)
    settings = _settings(config)
    if changed == "masks":
        held = torch.ones_like(held)
    else:
        settings = replace(settings, **{changed: CHANGES[changed]})
    *_, wrong = _rounds(model, digits, config, settings, held)
    assert _difference(right, wrong) > 1e-2


def test_the_data_leaves_rows_untrained(digits: Federation) -> None:
    held, config = _held(digits), _config("uniform", "fixed")
    assert not held.all(1).any()  # every client's loss is masked
    rounds = range(1, config.train.rounds + 1)
    chosen = [
        [p.client for p in next(sample_participants(config.federation, CLIENTS, ["full"], SEED, r))] for r in rounds
    ]
    assert any(not held[clients].any(0).all() for clients in chosen)  # a row that nobody trains keeps its value


@pytest.mark.slow
def test_it_runs_by_itself() -> None:
    done = forked.script(EXAMPLE)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert last[:2] == ["round", "12"]
    accuracies = [float(word.removesuffix("%")) for word in last if word.endswith("%")]
    assert len(accuracies) == 4
    assert min(accuracies) > 50  # chance is 10 %

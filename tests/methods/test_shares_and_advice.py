"""Tiers that are shares of the parameters, warnings of tiers that save nothing, and advice that fits the model."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.config.loading import parse
from fedhm.config.section import tier_name
from fedhm.config.units import parse_share
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.lowrank.plan import plan_parameters, plan_ranks, ratio_of_share
from fedhm.methods.advice import nothing_to_factorize, too_large
from fedhm.methods.fedhm import FedHM, FedHMConfig
from fedhm.models import resnet18
from small import small_config, small_federation, small_model


def method(model: nn.Module, **settings: object) -> FedHM:
    return FedHM(model, FedHMConfig.model_validate({"name": "fedhm", **settings}))


def size(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


class Mostly(nn.Module):
    """A body that can be factorized, beside one layer with most of the parameters."""

    def __init__(self, large: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.large = nn.Linear(8, 32), nn.Linear(32, 32), large
        self.fc = nn.Linear(32, 3)


@pytest.mark.parametrize("share", ["50%", "30%", "12.5%"])
def test_a_share_is_the_largest_ratio_within_it(share: str) -> None:
    model = resnet18(10, width=0.25)
    running = method(model, tiers=[1, share])
    assert running.tiers == ("full", share)
    kept = size(running.network(running.spec(share))) / size(model)
    assert kept <= parse_share(share)
    ratio = running.planner.ratios[share]
    larger = plan_ranks(model, ratio + 1 / 64)  # every layer has at most 128 ranks: one more somewhere
    assert plan_parameters(model, larger) / size(model) > kept


def test_shares_and_ratios_mix_and_are_listed_by_size() -> None:
    model = resnet18(10, width=0.25)
    assert method(model, tiers=[1, "60%", "1/8"]).tiers == ("full", "60%", "1/8")
    with pytest.raises(FedhmError, match="all tiers are listed with the largest first"):
        method(model, tiers=["30%", "60%"])


@pytest.mark.parametrize(("given", "name"), [("50%", "50%"), (" 50.0 % ", "50%"), ("12.5%", "12.5%"), ("100%", "full")])
def test_shares_have_one_name(given: str, name: str) -> None:
    config = parse({"method": {"name": "fedhm", "tiers": [1, given]}, "federation": {"clients": 2}}, "test")
    assert tier_name(config.method.tiers[1]) == name  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ["0%", "101%", "-5%", "half%", "%", "1e3%"])
def test_what_is_no_share_is_a_sentence(given: str) -> None:
    with pytest.raises(FedhmError, match=r"is no share of the parameters: write it like 50%"):
        parse({"method": {"name": "fedhm", "tiers": [given]}}, "test")


def test_a_share_below_the_dense_layers_says_what_would_help() -> None:
    with pytest.raises(FedhmError, match=r"tier 12% cannot be met: with rank 1 in all 1 factorized layers") as found:
        method(Mostly(nn.ConvTranspose2d(64, 64, 3)), tiers=["12%"])
    sentence = str(found.value)
    assert "'large' 96 % (a ConvTranspose2d" in sentence
    assert "ask for at least so much" in sentence
    assert "docs/extending.md" in sentence


def test_no_ratio_has_a_share_that_is_too_small() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    assert ratio_of_share(model, 0.01, lambda ratio: plan_ranks(model, ratio, 0)) is None


def test_a_run_with_shares_trains_every_tier() -> None:
    federation = small_federation()
    clients = [(each.inputs, each.labels) for each in federation.clients]
    settings = {"method": {"tiers": ["90%", "40%"]}, "train": {"rounds": 2, "batch": 8}}
    result = fedhm.run(small_model(), clients, clients[0], settings)
    assert result.metrics.keys() == {"90%", "40%"}
    whole = size(small_model())
    assert result.costs["40%"].parameters <= 0.4 * whole < result.costs["90%"].parameters <= 0.9 * whole


@pytest.mark.parametrize(
    ("large", "advice"),
    [
        (nn.Conv2d(400, 400, 3, groups=4), "heterofl"),
        (nn.Embedding(5000, 32, max_norm=1.0), "without max_norm"),
        (nn.ConvTranspose2d(64, 64, 3), "docs/extending.md"),
        (nn.utils.parametrizations.orthogonal(nn.Linear(300, 300)), "remove the parametrization"),
    ],
)
def test_a_tier_that_saves_nothing_says_why_and_what_would_help(large: nn.Module, advice: str) -> None:
    model = Mostly(large)
    sentence = too_large(model, plan_ranks(model, 1 / 4), "1/4")
    assert sentence.startswith("tier 1/4 keeps ")
    assert "'large' " in sentence
    assert advice in sentence


def test_a_tied_embedding_and_a_large_ratio_have_their_own_advice() -> None:
    model = Mostly(nn.Embedding(5000, 32))
    model.fc = nn.Linear(32, 5000, bias=False)
    model.fc.weight = model.large.weight  # type: ignore[assignment]
    assert "untie the embedding" in too_large(model, plan_ranks(model, 1 / 4), "1/4")
    wide = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(100, 2))
    assert "method.tiers = ['50%']" in too_large(wide, plan_ranks(wide, 0.45, 0), "0.45")
    assert too_large(wide, plan_ranks(wide, 1 / 8, 0), "1/8") == ""


def test_a_run_warns_of_such_a_tier_before_it_starts() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
    clients = [(each.inputs, each.labels) for each in small_federation().clients]
    settings = {"method": {"tiers": [1, "1/2"]}, "train": {"rounds": 1, "batch": 8}}
    with pytest.warns(FedhmWarning, match=r"tier 1/2 keeps 89 % .*'1' \d+ % \(among the first 1 .*method.keep"):
        fedhm.run(model, clients, clients[0], settings)


def test_nothing_to_factorize_lists_layers_reasons_and_advice() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 4, 4))
    with pytest.raises(FedhmError, match="nothing to factorize for tier 1/2: every layer stays dense") as found:
        method(model, tiers=["1/2"])
    sentence = str(found.value)
    assert "a depthwise convolution" in sentence
    assert "method.keep" in sentence
    assert "heterofl" in sentence
    assert "a smaller ratio" not in sentence  # it would not help
    empty = nn.Sequential(nn.ReLU())
    assert "no layer with a weight matrix" in nothing_to_factorize(empty, plan_ranks(empty, 1 / 2), "1/2")


def test_the_method_keeps_layers_dense_by_name() -> None:
    model = small_model()
    running = method(model, tiers=["1/4"], dense=["7"])
    assert set(running.planner.first["1/4"].ranks) == {"3"}
    budget = FedHM(model, FedHMConfig.model_validate({"name": "fedhm", "tiers": ["parameters:3.5k"], "dense": ["7"]}))
    assert "7" not in budget.planner._smallest
    with pytest.raises(FedhmError, match="there is no layer 'x' with a weight matrix in this model to keep dense"):
        method(model, dense=["x"])


class Exits(nn.Module):
    """A network with two exits, whose scores are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(36, 64), nn.Linear(64, 64)
        self.early, self.late = nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).relu()
        return (self.early(x) + self.late(self.second(x).relu())) / 2


class Stacked(Exits):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).relu()
        return torch.stack([self.early(x), self.late(self.second(x).relu())]).mean(0)


class Scaled(Exits):
    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.second(self.first(x.flatten(1)).relu()).relu()).softmax(1)


@pytest.mark.parametrize(
    ("model", "found"), [(Exits(), ("early", "late")), (Stacked(), ("early", "late")), (Scaled(), ())]
)
def test_all_classifiers_of_a_model_are_found(model: nn.Module, found: tuple[str, ...]) -> None:
    from fedhm.networks.inputs import probe_model

    assert probe_model(model, torch.randn(1, 1, 6, 6), lambda _: None) == found


def test_rows_of_every_classifier_are_averaged_over_the_clients_with_the_label() -> None:
    """No client holds label 3: its rows stay as they were in both exits, and those of other labels do not."""
    torch.manual_seed(0)
    model = Exits()
    x = torch.randn(2, 16, 1, 6, 6)
    y = torch.arange(16) % 2
    clients = [(x[0], y), (x[1], y + 1)]
    test = (x.flatten(0, 1), torch.arange(32) % 4)
    settings = {
        "method": {"tiers": [1, "1/4"]},
        "train": {"rounds": 1, "batch": 8, "masked_loss": True},
        "federation": {"participation": 1.0},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedhmWarning)
        result = fedhm.run(model, clients, test, settings)
    after = result.networks["full"].state_dict()
    for layer in ("early", "late"):
        before = model.state_dict()[f"{layer}.weight"]
        assert torch.equal(after[f"{layer}.weight"][3], before[3])
        assert not torch.equal(after[f"{layer}.weight"][:3], before[:3])


def test_the_default_tiers_of_the_small_settings_have_no_remarks() -> None:
    assert small_config().method.build(resnet18(10, width=0.25), _setup()).remarks() == []


def _setup() -> object:
    from fedhm.methods.method import Setup

    return Setup()

"""The scaler of the methods of widths: what is evaluated and handed out computes what was trained."""

import pytest
import torch
from torch import nn

from conftest import small_model
from fedhm.methods.fedrolex import FedRolex, FedRolexConfig
from fedhm.methods.heterofl import HeteroFL, HeteroFLConfig
from fedhm.methods.method import Setup
from fedhm.methods.splitmix import SplitMix, SplitMixConfig
from fedhm.models import resnet18
from fedhm.networks.exchange import exchanged_tensors, load
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant

SETUP = Setup("9", torch.zeros(1, 1, 6, 6), seed=3)
HIDDEN = 8  # the layers before it end in the hidden one, which has no normalisation behind it


def prefix(network: nn.Module, count: int) -> nn.Module:
    assert isinstance(network, nn.Sequential)
    return network[:count]


@pytest.mark.parametrize(("rule", "config"), [(HeteroFL, HeteroFLConfig), (FedRolex, FedRolexConfig)])
@pytest.mark.parametrize("mode", [True, False])
def test_a_tier_is_handed_out_at_the_scale_at_which_it_trains(rule: type, config: type, mode: bool) -> None:
    method = rule(small_model(), config(tiers=(1.0, 0.5)), SETUP)
    state = method.start(exchanged_tensors(small_model()))
    (task,) = method.tasks(state, [Participant(0, "w0.5")], 1)
    trained = load(method.network(task.network), task.tensors).train(mode)
    deployed_weights = load(method.network(method.spec("w0.5")), method.weights(state, "w0.5")).train(mode)
    raw = load(method.network(method.spec("w0.5")), task.tensors).train(mode)  # as if there were no scaler
    x = torch.randn(5, 1, 6, 6)
    torch.testing.assert_close(prefix(trained, HIDDEN)(x), 2 * prefix(raw, HIDDEN)(x))
    torch.testing.assert_close(deployed_weights(x), trained(x))
    assert not deployed_weights._modules["7"]._forward_hooks  # type: ignore[union-attr]


@pytest.mark.parametrize("scaler", [True, False])
def test_splitmix_ensembles_networks_at_the_scale_at_which_they_train(scaler: bool) -> None:
    method = SplitMix(small_model(), SplitMixConfig(base=0.25, tiers=(2, 1), scaler=scaler), SETUP)
    state = method.start(exchanged_tensors(small_model()))
    x = torch.randn(5, 1, 6, 6)
    singles = [load(method.network(NetworkSpec("w0.25", variant="base")), base).eval() for base in state.bases]
    mixed = load(method.network(method.spec("2x0.25")), method.weights(state, "2x0.25")).eval()
    torch.testing.assert_close(mixed(x), (singles[0](x) + singles[1](x)) / 2)
    raw = load(method.slices.network(NetworkSpec("w0.25")), state.bases[0]).eval()
    torch.testing.assert_close(prefix(singles[0], HIDDEN)(x), prefix(raw, HIDDEN)(x) * (4 if scaler else 1))


def test_the_largest_tier_of_heterofl_is_the_whole_model() -> None:
    """Published: rate / global rate, and the global model begins as a network of its own width."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    method = HeteroFL(model, HeteroFLConfig(tiers=(0.5, 0.25)), Setup("4", torch.zeros(1, 50)))
    state = method.start(exchanged_tensors(model))
    largest, smallest = method.tasks(state, [Participant(0, "w0.5"), Participant(1, "w0.25")], 1)
    assert (str(largest.network), str(smallest.network)) == ("w0.5", "scaled w0.25")
    fresh = nn.Linear(200, 200).weight.std().item()
    assert largest.tensors["2.weight"].std().item() == pytest.approx(fresh, rel=0.02)
    x = torch.randn(3, 50)
    scaled = load(method.network(smallest.network), smallest.tensors)
    raw = load(method.network(method.spec("w0.25")), smallest.tensors)
    torch.testing.assert_close(prefix(scaled, 1)(x), 2 * prefix(raw, 1)(x))


@pytest.mark.parametrize(
    ("rule", "config"), [(HeteroFL, HeteroFLConfig(tiers=(0.5, 0.25))), (FedRolex, FedRolexConfig(tiers=(0.5,)))]
)
def test_behind_a_normalisation_there_is_no_scaler(rule: type, config: object) -> None:
    model = resnet18(4, width=0.125)
    method = rule(model, config, Setup("fc", torch.zeros(1, 3, 8, 8)))
    tasks = list(method.tasks(method.start(exchanged_tensors(model)), [Participant(0, t) for t in method.tiers], 1))
    assert [str(task.network) for task in tasks] == [task.tier for task in tasks]

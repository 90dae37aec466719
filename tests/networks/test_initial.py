"""How networks begin: the published rule for the library's own, each layer's own for any other."""

import pytest
import torch
from torch import nn

from conftest import small_config, small_model
from fedhm.errors import FedhmError
from fedhm.models import cnn, mlp, resnet18
from fedhm.models.build import build_model
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.structure import reinitialise
from fedhm.seeds import derive


def fan_in(layer: nn.Module) -> int:
    return layer.weight[0].numel()  # type: ignore[union-attr,index]


def fan_out(layer: nn.Module) -> int:
    return layer.weight[:, 0].numel()  # type: ignore[union-attr,index]


def layers(network: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in network.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}


@pytest.mark.parametrize("make", [lambda: cnn(width=2), lambda: resnet18(100, width=0.5)], ids=["cnn", "resnet18"])
@pytest.mark.parametrize("again", [False, True])
def test_convolutions_begin_with_variance_two_over_outputs(make: object, again: bool) -> None:
    torch.manual_seed(0)
    network = make()  # type: ignore[operator]
    if again:
        before = exchanged_tensors(network)["conv1.weight"].clone()
        assert not torch.equal(exchanged_tensors(reinitialise(network))["conv1.weight"], before)
    for name, layer in layers(network).items():
        if not isinstance(layer, nn.Conv2d):
            assert layer.weight.abs().max().item() <= fan_in(layer) ** -0.5, name  # torch's own
            continue
        weight = layer.weight.detach().double()
        deviations = 4 / (2 * weight.numel()) ** 0.5  # four standard errors of a sample's deviation
        assert weight.std().item() == pytest.approx((2 / fan_out(layer)) ** 0.5, rel=deviations), name
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert torch.equal(layer.weight, torch.ones_like(layer.weight))
            assert torch.equal(layer.bias, torch.zeros_like(layer.bias))


@pytest.mark.parametrize("name", ["cnn", "resnet10"])
@pytest.mark.parametrize("again", [False, True])
def test_the_published_rule_is_by_inputs_and_draws_linear_layers_too(name: str, again: bool) -> None:
    config = small_config(model={"name": name, "width": 1.0, "init": "fan-in"})
    network = build_model(config, (3, 8, 8), 100)
    network = reinitialise(network) if again else network
    for layer_name, layer in layers(network).items():
        weight = layer.weight.detach().double()  # type: ignore[union-attr,operator]
        deviations = 4 / (2 * weight.numel()) ** 0.5
        assert weight.std().item() == pytest.approx((2 / fan_in(layer)) ** 0.5, rel=deviations), layer_name


def test_the_first_weights_stay_as_they_were_without_the_setting() -> None:
    built = build_model(small_config(model={"name": "cnn"}), (1, 8, 8), 10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(0, "model"))
        expected = cnn(10, 1)
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), expected.parameters(), strict=True))


def test_networks_without_the_setting_refuse_it() -> None:
    with pytest.raises(FedhmError, match=r"init is a setting of the cnn and the ResNets, not of name = 'mlp'"):
        small_config(model={"name": "mlp", "init": "fan-in"})


def test_the_weights_are_root_six_times_torchs() -> None:
    torch.manual_seed(0)
    ours = resnet18().layer4[1].conv1.weight.std().item()
    assert ours / nn.Conv2d(512, 512, 3).weight.std().item() == pytest.approx(6**0.5, rel=0.01)


@pytest.mark.parametrize("make", [small_model, mlp], ids=["own", "mlp"])
def test_other_networks_are_drawn_anew_as_torch_draws_their_layers(make: object) -> None:
    torch.manual_seed(0)
    network = reinitialise(make())  # type: ignore[operator]
    for name, layer in layers(network).items():
        bound = fan_in(layer) ** -0.5  # of a uniform distribution
        assert 0.8 * bound < layer.weight.abs().max().item() <= bound, name

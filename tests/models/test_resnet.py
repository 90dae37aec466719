"""ResNets are called by the number of their layers with weights, shortcuts aside."""

import pytest
import torch
from torch import nn

from fedhm.models import MODELS


@pytest.mark.parametrize("layers", [10, 18, 34])
def test_a_resnet_has_as_many_layers_as_its_name_says(layers: int) -> None:
    network = MODELS[f"resnet{layers}"](num_classes=7, in_channels=3, width=1 / 16)
    weighted = [name for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len([name for name in weighted if "shortcut" not in name]) == layers
    assert network(torch.zeros(2, 3, 16, 16)).shape == (2, 7)

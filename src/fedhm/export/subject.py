"""What is exported: a network, the raw inputs that it is to take, and samples to compare and measure it on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedhm.config.sections.objective import Objective
from fedhm.data.batches import Preprocessing
from fedhm.data.samples import Samples


@dataclass(frozen=True)
class Subject:
    network: nn.Module
    name: str  # of its files: a tier
    inputs: Tensor  # raw ones to compare on: uint8 images (N, C, H, W), or what the network takes
    random: bool  # those inputs are made up
    preprocessing: Preprocessing | None = None  # None: the network takes raw inputs
    classes: tuple[str, ...] = ()
    objective: Objective | None = None
    test: Samples | None = None  # to measure the metrics on
    calibration: Tensor | None = None  # raw inputs that were trained on: static int8 needs some
    origin: Mapping[str, str] = field(default_factory=dict)  # what data and settings it comes from

    @torch.no_grad()
    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the network itself gives for raw inputs, by the way that it was trained and evaluated."""
        if self.preprocessing is not None:
            inputs = self.preprocessing.normalise(inputs.permute(0, 2, 3, 1).contiguous())
        outputs: Tensor = self.network.eval()(inputs)
        return outputs


class RawImages(nn.Module):
    """A network with its normalisation before it: takes uint8 images (N, C, H, W)."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.network = network
        for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
            self.register_buffer(name, (torch.tensor(values) * 255)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.network((images.float() - self.mean) / self.std)
        return outputs

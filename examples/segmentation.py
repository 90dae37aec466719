"""A U-Net that finds discs in noisy images, on clients with different devices. The data is made here."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedhm

SIZE = 32


class Discs(Dataset[tuple[Tensor, Tensor]]):
    """Noisy images of a bright and a dark disc, and the class of every pixel: background, bright, dark."""

    def __init__(self, count: int, seed: int, mirror: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.places = torch.rand(count, 2, 3, generator=generator)  # of both discs: row, column and radius
        self.noise = 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
        self.mirror = mirror

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        mask = torch.zeros(SIZE, SIZE, dtype=torch.int64)
        for number, (row, column, radius) in enumerate(self.places[index].tolist(), start=1):
            apart = (rows - SIZE * row) ** 2 + (columns - SIZE * column) ** 2
            mask[apart < (4 + 4 * radius) ** 2] = number
        image = self.noise[index] + torch.tensor([0.0, 1.0, -1.0])[mask]
        if self.mirror and torch.rand(()) < 0.5:  # drawn anew in every epoch, for image and mask alike
            image, mask = image.flip(-1), mask.flip(-1)
        return image, mask


def block(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two steps down and two up, with the images of each size passed across."""

    def __init__(self, classes: int = 3, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.middle = block(2 * width, 4 * width)
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for part in self.down:
            across.append(part(x))
            x = F.max_pool2d(across[-1], 2)
        x = self.middle(x)
        for part in self.up:
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), across.pop()], 1))
        scores: Tensor = self.classify(x)
        return scores


def main(rounds: int = 6) -> fedhm.Result:
    torch.manual_seed(0)
    clients = [Discs(24, seed, mirror=True) for seed in range(6)]
    config = {
        "train": {"rounds": rounds, "epochs": 2, "batch": 8, "lr": 0.1, "schedule": "cosine"},
        "method": {"tiers": [1, "1/2", "1/4"]},
        "federation": {"participation": 1.0},
    }
    result = fedhm.run(UNet(), clients, Discs(48, 99, mirror=False), config, objective=fedhm.Segmentation())
    print(result.summary())
    return result


if __name__ == "__main__":
    main()

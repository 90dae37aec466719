"""FedHM on a model and data of one's own: a network that the library has never seen, twelve clients of four sizes."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedhm


class TwoPaths(nn.Module):
    """Any module will do: here a convolutional path beside a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.linear = nn.Linear(64, 128)
        self.head = nn.Linear(32 * 16 + 128, 10)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(self.conv(self.stem(x).relu())).relu().flatten(1)
        logits: Tensor = self.head(torch.cat([seen, self.linear(x.flatten(1)).relu()], 1))
        return logits


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    inputs = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    clients = [TensorDataset(inputs[i:1500:12], labels[i:1500:12]) for i in range(12)]
    test = TensorDataset(inputs[1500:], labels[1500:])
    model = TwoPaths()

    print("At rank ratio 1/4:", fedhm.plan_ranks(model, 1 / 4), sep="\n")
    settings = {
        "method": {"tiers": [1, "1/2", "1/4", "1/8"]},  # client p has tier p mod 4
        "train": {"rounds": 10, "batch": 32, "lr": 0.05},
        "engine": {"threads": 1},  # so small a network gains nothing from more
    }
    result = fedhm.run(model, clients, test, settings)
    for tier, metrics in result.metrics.items():
        print(f"tier {tier:<4}  {result.costs[tier].parameters:6,} parameters  accuracy {metrics.accuracy:.1%}")

    smallest = result.networks["1/8"].eval()  # an ordinary module
    with torch.no_grad():
        print(f"tier 1/8 reads a {smallest(inputs[-1:]).argmax().item()}, which is a {labels[-1]}")


if __name__ == "__main__":
    main()

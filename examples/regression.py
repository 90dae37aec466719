"""Regression on a table: the progression of diabetes in 442 patients, from ten measurements, at eight clinics.

Nothing differs from classification but `objective="regression"`, and metrics are called by other names.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

import fedhm


def main() -> None:
    inputs, progression = (torch.tensor(t, dtype=torch.float32) for t in load_diabetes(return_X_y=True))
    inputs, progression = inputs / inputs.std(0), (progression - progression.mean()) / progression.std()
    clinics = [(inputs[i:352:8], progression[i:352:8]) for i in range(8)]
    test = inputs[352:], progression[352:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    settings = {
        "method": {"tiers": [1, "1/4", "1/8"]},
        "train": {"rounds": 20, "epochs": 2, "batch": 16, "lr": 0.02},
        "engine": {"threads": 1},  # so small a network gains nothing from more
    }
    result = fedhm.run(model, clinics, test, settings, objective="regression")
    for tier, metrics in result.metrics.items():
        parameters = result.costs[tier].parameters
        print(f"tier {tier:<4}  {parameters:5,} parameters  R² {metrics.r2:.2f}  mean squared error {metrics.mse:.2f}")


if __name__ == "__main__":
    main()

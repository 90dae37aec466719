"""The numbers that the FedHM paper publishes: sizes, accuracies, savings and settings.

These are facts of the paper, copied from its tables and its text. `artifacts.py` says which table needs which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DataName = Literal["cifar10", "cifar100", "tinyimagenet"]
PartitionName = Literal["iid", "dirichlet"]
DATA_TITLES: Mapping[DataName, str] = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "Tiny-ImageNet",
}
PARTITION_TITLES: Mapping[PartitionName, str] = {"iid": "IID", "dirichlet": "Non-IID"}

Accuracies = tuple[float, ...]  # in percent, of the best test round; the largest model first
PaperTable = Mapping[tuple[DataName, PartitionName], Mapping[str, Accuracies]]  # by setting, then by column


@dataclass(frozen=True)
class PaperSize:
    """The #Params of a row, and how many of the four capability levels train this model."""

    millions: float
    levels: int = 1


# By data set and column, a size for each row. Accuracies of all tables have these sizes.
SIZES: Mapping[DataName, Mapping[str, tuple[PaperSize, ...]]] = {
    "cifar10": {
        "splitmix": (PaperSize(12.33), PaperSize(4.12), PaperSize(2.75), PaperSize(1.37)),
        "heterofl": (PaperSize(11.17), PaperSize(4.29), PaperSize(2.80), PaperSize(1.37)),
        "heterofl-v2": (PaperSize(4.29, 2), PaperSize(2.80), PaperSize(1.37)),
        "heterofl-v3": (PaperSize(2.80, 3), PaperSize(1.37)),
        "fedavg": (PaperSize(1.37, 4),),
        "fedhm-paper": (PaperSize(11.17), PaperSize(4.16), PaperSize(2.21), PaperSize(1.24)),
        "fedhm-v2": (PaperSize(4.16, 2), PaperSize(2.21), PaperSize(1.24)),
        "fedhm-v3": (PaperSize(2.21, 3), PaperSize(1.24)),
        "lowrank-smallest": (PaperSize(1.24, 4),),
        "lowrank": (PaperSize(11.17), PaperSize(4.16), PaperSize(2.21), PaperSize(1.24)),
        "slimmed": (PaperSize(11.17), PaperSize(4.29), PaperSize(2.80), PaperSize(1.37)),
    },
    "cifar100": {
        "splitmix": (PaperSize(23.97), PaperSize(10.22), PaperSize(6.81), PaperSize(3.42)),
        "heterofl": (PaperSize(21.33), PaperSize(8.77), PaperSize(5.35), PaperSize(3.42)),
        "heterofl-v2": (PaperSize(8.77, 2), PaperSize(5.35), PaperSize(3.42)),
        "heterofl-v3": (PaperSize(5.35, 3), PaperSize(3.42)),
        "fedavg": (PaperSize(3.42, 4),),
        "fedhm-paper": (PaperSize(21.33), PaperSize(8.40), PaperSize(4.99), PaperSize(3.27)),
        "lowrank": (PaperSize(21.33), PaperSize(8.40), PaperSize(4.99), PaperSize(3.27)),
        "slimmed": (PaperSize(21.33), PaperSize(8.77), PaperSize(5.35), PaperSize(3.42)),
    },
    "tinyimagenet": {
        "splitmix": (PaperSize(24.11), PaperSize(10.33), PaperSize(6.89), PaperSize(3.44)),
        "heterofl": (PaperSize(21.38), PaperSize(8.80), PaperSize(5.38), PaperSize(3.44)),
        "heterofl-v2": (PaperSize(8.80, 2), PaperSize(5.38), PaperSize(3.44)),
        "heterofl-v3": (PaperSize(5.38, 3), PaperSize(3.44)),
        "fedavg": (PaperSize(3.44, 4),),
        "fedhm-paper": (PaperSize(21.38), PaperSize(8.45), PaperSize(5.04), PaperSize(3.33)),
        "lowrank": (PaperSize(21.38), PaperSize(8.45), PaperSize(5.04), PaperSize(3.33)),
        "slimmed": (PaperSize(21.38), PaperSize(8.80), PaperSize(5.38), PaperSize(3.44)),
    },
}

# Table 2: dynamic heterogeneity.
TABLE_2: PaperTable = {
    ("cifar10", "iid"): {
        "splitmix": (90.34, 89.87, 89.44, 88.13),
        "heterofl": (93.19, 93.13, 92.93, 92.16),
        "heterofl-v2": (93.19, 92.77, 92.01),
        "heterofl-v3": (93.18, 92.14),
        "fedavg": (92.66,),
        "fedhm-paper": (93.50, 93.52, 93.49, 93.43),
    },
    ("cifar10", "dirichlet"): {
        "splitmix": (85.93, 84.82, 84.54, 83.27),
        "heterofl": (91.57, 91.53, 91.03, 90.19),
        "heterofl-v2": (91.14, 91.03, 89.52),
        "heterofl-v3": (91.05, 89.93),
        "fedavg": (90.21,),
        "fedhm-paper": (91.59, 91.51, 91.55, 91.47),
    },
    ("cifar100", "iid"): {
        "splitmix": (69.38, 68.26, 67.63, 62.53),
        "heterofl": (66.56, 66.39, 65.68, 64.11),
        "heterofl-v2": (67.32, 66.32, 65.17),
        "heterofl-v3": (66.81, 65.31),
        "fedavg": (63.07,),
        "fedhm-paper": (72.38, 72.45, 72.44, 72.29),
    },
    ("cifar100", "dirichlet"): {
        "splitmix": (66.98, 65.81, 64.61, 60.17),
        "heterofl": (67.37, 67.30, 66.26, 64.56),
        "heterofl-v2": (66.76, 66.04, 64.75),
        "heterofl-v3": (67.25, 65.25),
        "fedavg": (66.69,),
        "fedhm-paper": (69.05, 69.07, 69.03, 68.90),
    },
    ("tinyimagenet", "iid"): {
        "splitmix": (55.88, 54.35, 52.24, 48.99),
        "heterofl": (54.63, 54.54, 52.97, 51.59),
        "heterofl-v2": (53.96, 52.71, 50.60),
        "heterofl-v3": (53.45, 51.27),
        "fedavg": (51.59,),
        "fedhm-paper": (57.80, 57.77, 57.82, 57.46),
    },
    ("tinyimagenet", "dirichlet"): {
        "splitmix": (53.87, 52.07, 50.35, 47.34),
        "heterofl": (52.88, 52.57, 51.55, 49.35),
        "heterofl-v2": (53.00, 51.59, 49.42),
        "heterofl-v3": (52.23, 49.69),
        "fedavg": (50.19,),
        "fedhm-paper": (52.38, 52.37, 52.35, 51.75),
    },
}

# Table 3: fixed heterogeneity.
TABLE_3: PaperTable = {
    ("cifar10", "iid"): {
        "splitmix": (90.34, 89.92, 89.33, 88.30),
        "heterofl": (89.82, 89.97, 89.38, 87.83),
        "heterofl-v2": (91.14, 91.03, 89.52),
        "heterofl-v3": (91.83, 90.15),
        "fedavg": (92.66,),
        "fedhm-paper": (93.46, 93.37, 93.40, 93.40),
    },
    ("cifar10", "dirichlet"): {
        "splitmix": (85.91, 84.85, 84.48, 83.30),
        "heterofl": (84.49, 86.44, 86.28, 84.08),
        "heterofl-v2": (87.61, 86.93, 84.20),
        "heterofl-v3": (87.46, 84.45),
        "fedavg": (90.21,),
        "fedhm-paper": (91.22, 91.21, 91.23, 91.17),
    },
    ("cifar100", "iid"): {
        "splitmix": (69.42, 68.30, 67.60, 62.59),
        "heterofl": (56.01, 59.23, 59.93, 57.95),
        "heterofl-v2": (62.05, 61.83, 59.20),
        "heterofl-v3": (64.24, 61.52),
        "fedavg": (63.07,),
        "fedhm-paper": (70.23, 70.23, 70.26, 70.00),
    },
    ("cifar100", "dirichlet"): {
        "splitmix": (67.02, 65.84, 64.65, 60.24),
        "heterofl": (53.55, 58.40, 58.61, 57.20),
        "heterofl-v2": (60.42, 59.16, 57.67),
        "heterofl-v3": (64.37, 60.06),
        "fedavg": (66.69,),
        "fedhm-paper": (69.04, 68.91, 68.97, 68.86),
    },
    ("tinyimagenet", "iid"): {
        "splitmix": (55.78, 54.69, 52.81, 48.86),
        "heterofl": (49.54, 49.90, 48.98, 46.52),
        "heterofl-v2": (50.15, 48.08, 45.53),
        "heterofl-v3": (50.79, 46.34),
        "fedavg": (51.59,),
        "fedhm-paper": (57.72, 57.69, 57.67, 57.49),
    },
    ("tinyimagenet", "dirichlet"): {
        "splitmix": (53.79, 52.27, 50.76, 47.04),
        "heterofl": (45.19, 46.14, 45.12, 43.19),
        "heterofl-v2": (46.98, 46.21, 42.68),
        "heterofl-v3": (49.19, 44.33),
        "fedavg": (50.19,),
        "fedhm-paper": (52.44, 52.48, 52.48, 52.35),
    },
}

# Table 7: combinations of tiers, "fixed" by its caption. Its first column repeats the dynamic numbers of Table 2.
TABLE_7: PaperTable = {
    ("cifar10", "iid"): {
        "fedhm-paper": (93.50, 93.52, 93.49, 93.43),
        "fedhm-v2": (93.33, 93.36, 93.35),
        "fedhm-v3": (93.27, 93.19),
        "lowrank-smallest": (92.99,),
    },
    ("cifar10", "dirichlet"): {
        "fedhm-paper": (91.59, 91.51, 91.55, 91.47),
        "fedhm-v2": (91.18, 91.17, 91.25),
        "fedhm-v3": (90.93, 90.95),
        "lowrank-smallest": (90.95,),
    },
}

# Table 8: one model for all clients, low-rank or slimmed. The first row is the full model.
TABLE_8: PaperTable = {
    ("cifar10", "iid"): {
        "lowrank": (94.16, 93.76, 93.78, 92.99),
        "slimmed": (94.16, 93.75, 93.17, 92.66),
    },
    ("cifar10", "dirichlet"): {
        "lowrank": (92.50, 92.25, 92.05, 90.95),
        "slimmed": (92.50, 92.08, 91.25, 90.21),
    },
    ("cifar100", "iid"): {
        "lowrank": (69.02, 71.92, 72.40, 71.05),
        "slimmed": (69.02, 67.50, 65.06, 63.07),
    },
    ("cifar100", "dirichlet"): {
        "lowrank": (68.13, 70.69, 69.70, 67.96),
        "slimmed": (68.13, 68.32, 66.73, 66.69),
    },
    ("tinyimagenet", "iid"): {
        "lowrank": (56.20, 58.68, 57.27, 55.92),
        "slimmed": (56.20, 53.19, 52.26, 50.89),
    },
    ("tinyimagenet", "dirichlet"): {
        "lowrank": (56.00, 55.29, 53.07, 50.37),
        "slimmed": (56.00, 53.61, 52.80, 50.19),
    },
}


@dataclass(frozen=True)
class PaperSavings:
    """Figure 4: how many times less the low-rank model spends than the full model to reach the target accuracy."""

    communication: float
    computation: float


FIGURE_4: Mapping[tuple[DataName, PartitionName], PaperSavings] = {
    ("cifar10", "iid"): PaperSavings(6.1, 2.9),
    ("cifar10", "dirichlet"): PaperSavings(7.6, 3.6),
    ("cifar100", "iid"): PaperSavings(7.9, 2.1),
    ("cifar100", "dirichlet"): PaperSavings(8.1, 1.8),
}


@dataclass(frozen=True)
class PaperSettings:
    """Table 4: how the paper trains."""

    model: str
    rounds: int
    milestones: tuple[int, ...]
    samples_per_client: int
    test_samples: int  # of the data set; the paper does not list them
    clients: int = 20
    participation: float = 0.5
    epochs: int = 10
    batch: int = 64
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 1e-4
    lr: float = 0.1
    lr_decay: float = 0.1


TABLE_4: Mapping[DataName, PaperSettings] = {
    "cifar10": PaperSettings("resnet18", 160, (100, 150), 2500, 10_000),
    "cifar100": PaperSettings("resnet34", 100, (70, 90), 2500, 10_000),
    "tinyimagenet": PaperSettings("resnet34", 60, (40, 55), 5000, 10_000),
}

# Section "Hybrid Network Structure": the share of layer3 and layer4, in percent.
LATE_PARAMETERS = 93.0  # "over", of both networks
LATE_MACS_RESNET34 = 55.6

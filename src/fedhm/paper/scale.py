"""The two scales of a reproduction: the paper's own, and a small one of minutes a run on a CPU.

The small scale is derived from the paper's preset by the changes that `SmallScale` names, and by no others: the family
of networks, tiers, `keep`, clients, learning rate and heterogeneity are the paper's.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedhm.assembly import input_format
from fedhm.compare.command import config_in_setting
from fedhm.config.loading import load_config
from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.paper.artifacts import Setting
from fedhm.paper.numbers import TABLE_4, DataName, PartitionName

ScaleName = Literal["paper", "small"]
FIXED = {
    "data.source": "choose the data set with --data",
    "data.partition": "choose the partition with --partition",
    "federation.heterogeneity": "table2 has dynamic tiers, and table3 has fixed ones",
}
PRESETS: dict[DataName, str] = {
    "cifar10": "cifar10-resnet18",
    "cifar100": "cifar100-resnet34",
    "tinyimagenet": "tinyimagenet-resnet34",
}


@dataclass(frozen=True)
class SmallScale:
    """How the small scale differs from the paper's. Everything in rounds or pixels follows in proportion."""

    width: float = 0.125  # 8 channels in the first stage
    pixels: int = 16  # of an image's side
    samples: int = 50_000  # of larger training sets: as many as CIFAR has
    rounds: int = 20
    epochs: int = 1
    batch: int = 50
    evaluate_every: int = 2
    threads: int = 1

    def changes(self, data: DataName) -> list[str]:
        """Return the changes to the paper's preset, as `--set` takes them."""
        preset, paper = load_config(PRESETS[data]), TABLE_4[data]
        assert preset.data is not None  # presets name their data
        (_, side, _), _ = input_format(preset)
        downscale = side // self.pixels
        milestones = [round(self.rounds * each / preset.train.rounds) for each in preset.train.milestones]
        values: dict[str, object] = {
            "model.width": self.width,
            "data.downscale": downscale,
            "data.crop": preset.data.crop // downscale,
            "train.rounds": self.rounds,
            "train.epochs": self.epochs,
            "train.batch": self.batch,
            "train.milestones": milestones,
            "evaluation.every": self.evaluate_every,
            "evaluation.static_from": milestones[0],
            "engine.threads": self.threads,
            # The paper's widths are matched to wide networks; here they are matched to the narrow ones. Split-Mix's
            # numbers of base networks stay the paper's: matched ones may give two tiers the same number.
            "compare.widths": [],
        }
        if paper.samples_per_client * paper.clients > self.samples:
            values["data.train_samples"] = self.samples
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def paper_config(
    data: DataName, partition: PartitionName, setting: Setting, scale: ScaleName, changes: Sequence[str] = ()
) -> Config:
    """Return the settings of runs at a scale. Changes of `--set` come last, and so they win."""
    for change in changes:
        key = change.partition("=")[0].strip()
        if key in FIXED:  # folders, titles and the paper's numbers go by the options
            raise FedhmError(f"--set {key} would contradict the table: {FIXED[key]}")
    scaled = SmallScale().changes(data) if scale == "small" else []
    heterogeneity = "dynamic" if setting == "dynamic" else "fixed"  # does not matter to homogeneous runs
    return config_in_setting(PRESETS[data], [*scaled, f"data.partition={partition}", *changes], heterogeneity)

"""The settings of trackers: which tools are told how a run goes. They do not make it another run."""

from pathlib import Path
from typing import Literal

from fedhm.config.section import Section


class TrackingConfig(Section):
    tensorboard: str = ""  # a folder, in which every run has one of its own; empty: none
    mlflow: str = ""  # a tracking URI, or a folder; empty: none
    mlflow_experiment: str = "fedhm"
    wandb: str = ""  # a project; empty: none
    wandb_mode: Literal["online", "offline"] = "online"  # offline: into the run's folder, for `wandb sync`
    models: bool = True  # the final models are kept as artefacts, where a tracker has such

    def placed(self) -> "TrackingConfig":
        """Return the settings with whole paths: on Flower another process follows them, in another folder."""
        board = str(Path(self.tensorboard).absolute()) if self.tensorboard else ""
        is_folder = self.mlflow and "://" not in self.mlflow and ":" not in self.mlflow and self.mlflow != "databricks"
        place = str(Path(self.mlflow).absolute()) if is_folder else self.mlflow
        return self.model_copy(update={"tensorboard": board, "mlflow": place})

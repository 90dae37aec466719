"""The trackers that a config names."""

from fedhm.config.sections.tracking import TrackingConfig
from fedhm.tracking.ml_flow import MLflow
from fedhm.tracking.tensor_board import TensorBoard
from fedhm.tracking.tracker import Tracker
from fedhm.tracking.weights_biases import Wandb


def trackers(config: TrackingConfig | None) -> list[Tracker]:
    """Make the trackers, none of which begins before its run does; one that is not installed is refused."""
    if config is None:
        return []
    found: list[Tracker] = []
    if config.tensorboard:
        found.append(TensorBoard(config.tensorboard, models=config.models))
    if config.mlflow:
        found.append(MLflow(config.mlflow, config.mlflow_experiment, models=config.models))
    if config.wandb:
        found.append(Wandb(config.wandb, config.wandb_mode, models=config.models))
    return found

"""Trackers: TensorBoard, MLflow and Weights & Biases are told how a run goes, each by its own client.

`fedhm.run(..., watchers=[fedhm.tracking.TensorBoard("boards")])`, or the section `[tracking]` of a config. A watcher
of your own (`fedhm.Watcher`) may be anything else.
"""

from fedhm.tracking.trackers import MLflow, TensorBoard, Tracker, Wandb

__all__ = ["MLflow", "TensorBoard", "Tracker", "Wandb"]

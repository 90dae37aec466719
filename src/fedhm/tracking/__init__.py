"""Trackers that log a run to TensorBoard, MLflow or Weights & Biases.

Use `fedhm.run(..., watchers=[fedhm.tracking.TensorBoard("boards")])`, or the section `[tracking]` of a config. For
another tool, subclass `Tracker`; for anything else, write your own `fedhm.Watcher`.
"""

from fedhm.tracking.trackers import MLflow, TensorBoard, Tracker, Wandb

__all__ = ["MLflow", "TensorBoard", "Tracker", "Wandb"]

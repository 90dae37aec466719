"""TensorBoard: event files in a folder, written by torch's own client."""

import os
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedhm.config.schema import TrackingConfig
from fedhm.server.callbacks import About
from fedhm.tracking.tracker import Tracker, settings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Tracker):
    """Write event files into a folder of the run's own below `folder`."""

    called: ClassVar = "TensorBoard"
    extra: ClassVar = "tensorboard"
    module: ClassVar = "tensorboard"
    takes_back: ClassVar = True  # by a mark on which rounds no longer count

    def __init__(self, folder: str | Path, *, models: bool = True) -> None:
        self._boards = Path(folder).absolute()
        super().__init__(str(self._boards), models=models)
        self._writer: SummaryWriter

    def open(self, about: About, name: str, run: str, first: int) -> str:
        from torch.utils.tensorboard import SummaryWriter

        run = run or self._free(name)
        self._writer = SummaryWriter(str(self._boards / run), purge_step=first if first > 1 else None)
        if first == 1:
            self._writer.add_text("settings", "\n".join(f"    {line}" for line in about.config.to_toml().splitlines()))
        self._writer.flush()
        return run

    def _free(self, name: str) -> str:
        return next(n for k in count(1) if not (self._boards / (n := name if k == 1 else f"{name}-{k}")).exists())

    def log(self, found: Mapping[str, float], round_number: int) -> None:
        for name, value in found.items():
            self._writer.add_scalar(name, value, round_number)
        self._writer.flush()

    def keep(self, files: Sequence[Path]) -> None:
        """Keep nothing: TensorBoard has no artefacts, and the run's folder holds the models."""

    def end(self, complete: bool) -> None:  # noqa: ARG002
        self._writer.close()


# MLflow: a server, a database or a folder, by `MlflowClient`.

if TYPE_CHECKING:
    from mlflow import MlflowClient

MOST = 100  # parameters, or metrics, of one request
LONGEST = 500  # characters of a parameter
# its own defaults try for minutes, in which a run would stand still; who sets them has others
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MLflow(Tracker):
    """Tell the MLflow at `uri`, which may be a folder, in an experiment of this name."""

    called: ClassVar = "MLflow"
    extra: ClassVar = "mlflow"
    module: ClassVar = "mlflow"

    def __init__(self, uri: str | Path, experiment: str = "fedhm", *, models: bool = True) -> None:
        self._uri = str(uri)
        if ":" not in self._uri and self._uri != "databricks":
            self._uri = Path(self._uri).absolute().as_uri()
        super().__init__(f"{self._uri} {experiment}", models=models)
        self._experiment = experiment
        self._client: MlflowClient
        self._id = ""
        self._doubtful = 0  # the round that it may have got when the run was killed

    def open(self, about: About, name: str, run: str, first: int) -> str:
        for key, value in PATIENCE.items():
            os.environ.setdefault(key, value)
        if self._uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder was asked for by its name
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunStatus

        self._client = MlflowClient(tracking_uri=self._uri)
        if run:
            self._client.update_run(run, status=RunStatus.to_string(RunStatus.RUNNING))
            self._id, self._doubtful = run, first
            return run
        experiment = self._client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        self._id = self._client.create_run(number, run_name=name).info.run_id
        params = [Param(key, str(value)[:LONGEST]) for key, value in settings(about.config).items()]
        for start in range(0, len(params), MOST):
            self._client.log_batch(self._id, params=params[start : start + MOST])
        return self._id

    def log(self, found: Mapping[str, float], round_number: int) -> None:
        from mlflow.entities import Metric

        names = list(found)
        if round_number == self._doubtful:
            names = [name for name in names if not self._has(name, round_number)]
        self._doubtful = round_number  # until all of it is there
        now = int(time.time() * 1000)
        metrics = [Metric(name, found[name], now, round_number) for name in names]
        for start in range(0, len(metrics), MOST):
            self._client.log_batch(self._id, metrics=metrics[start : start + MOST])

    def _has(self, name: str, round_number: int) -> bool:
        return any(metric.step == round_number for metric in self._client.get_metric_history(self._id, name))

    def keep(self, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._id, str(file), "models")

    def end(self, complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")


# Weights & Biases, online or offline, by wandb's own client.


class Wandb(Tracker):
    """Tell a project; offline, what is told lies in the run's folder until `wandb sync` sends it."""

    called: ClassVar = "Weights & Biases"
    extra: ClassVar = "wandb"
    module: ClassVar = "wandb"

    def __init__(self, project: str, mode: Literal["online", "offline"] = "online", *, models: bool = True) -> None:
        super().__init__(project, models=models)
        self._project, self._mode = project, mode
        self._wandb_run: Any = None

    def open(self, about: About, name: str, run: str, first: int) -> str:  # noqa: ARG002
        import wandb

        quiet = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
        self._wandb_run = wandb.init(
            project=self._project,
            name=name,
            id=run or None,
            resume="allow",
            reinit="create_new",  # one that was interrupted in this process is not to be mistaken for this one
            mode=self._mode,
            dir=str(about.folder.absolute()) if about.folder else None,
            config=settings(about.config),
            settings=quiet,
        )
        return str(self._wandb_run.id)

    def log(self, found: Mapping[str, float], round_number: int) -> None:
        self._wandb_run.log(dict(found), step=round_number, commit=True)

    def keep(self, files: Sequence[Path]) -> None:
        import wandb

        artefact = wandb.Artifact(f"models-{self._wandb_run.id}", type="model")
        for file in files:
            artefact.add_file(str(file), name=file.name, policy="mutable")
        self._wandb_run.log_artifact(artefact)

    def end(self, complete: bool) -> None:
        self._wandb_run.finish(exit_code=0 if complete else 1)


# The trackers that a config names.


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

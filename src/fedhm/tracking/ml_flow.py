"""MLflow: a server, a database or a folder, by `MlflowClient`."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fedhm.server.watcher import About
from fedhm.tracking.tracker import Tracker
from fedhm.tracking.values import settings

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

"""All trackers: the base class `Tracker`, and TensorBoard, MLflow and Weights & Biases, each with its own client.

A resumed run continues in the same tracked run, and no failure of a tracker costs a round. For this, `tracking.json` in
the run's folder names the tracked run and the number of rounds that it has.
"""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from warnings import warn

from pydantic import TypeAdapter
from torch import nn

from fedhm.config.schema import Config, TrackingConfig
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.machine.extras import how_to_install
from fedhm.machine.files import file_name, os_error_sentence
from fedhm.machine.printable import printable
from fedhm.machine.seal import read_sealed_json, write_sealed_json
from fedhm.runs.folder import TRACKING
from fedhm.runs.models import save_tier, tier_file
from fedhm.server.callbacks import About
from fedhm.server.record import Record

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

_REFUSED = re.compile(r"[^\w\-. /]")  # characters that some tracker refuses in names
MAX_ERROR_LENGTH = 200  # characters of a tool's error message


def values(record: Record) -> dict[str, float]:
    """Return the numbers of a record by name: `accuracy/1-8`, `train_loss/full`, `diagnostics/kappa_uv`."""
    found: dict[str, float] = {
        "participants": len(record.participants),
        "dropped": len(record.dropped),
        "clipped": len(record.clipped),
        "attempts": record.attempts,
    }
    for tier, metrics in record.metrics.items():
        found |= {f"{name}/{file_name(tier)}": value for name, value in metrics.items()}
    for tier, traffic in record.traffic.items():
        of_tier = {"train_loss": traffic.loss, "bytes_down": traffic.down, "bytes_up": traffic.up, "macs": traffic.macs}
        found |= {f"{name}/{file_name(tier)}": value for name, value in of_tier.items()}
    for tier, at_clients in record.clients.items():
        for what in ("mean", "median", "worst_tenth"):
            of_clients = getattr(at_clients.overall, what)
            found |= {f"clients_{what}_{name}/{file_name(tier)}": value for name, value in of_clients.items()}
    found |= {f"diagnostics/{file_name(name)}": value for name, value in record.diagnostics.items()}
    found |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    if record.epsilon is not None:
        found["epsilon"] = record.epsilon
    if record.simulated is not None:
        found["simulated_seconds"] = record.simulated.seconds
    return {_REFUSED.sub("_", name): float(value) for name, value in found.items()}


def settings(config: Config) -> dict[str, Any]:
    """Return the settings by their dotted keys, without those of the trackers."""
    return {key: value for key, value in config.dotted().items() if not key.startswith("tracking.")}


@dataclass(frozen=True)
class TrackedRun:
    """An entry of `tracking.json`."""

    run: str = ""  # the tool's identifier of the tracked run; empty: there is none yet
    rounds: int = 0  # that the tracked run has


def _load(folder: Path | None, key: str) -> TrackedRun:
    """Return the entry of a tracker; an empty one if the run is not kept on disk."""
    return _read(folder / TRACKING).get(key, TrackedRun()) if folder else TrackedRun()


def _save(folder: Path | None, key: str, tracked: TrackedRun) -> None:
    if folder:
        known = _read(folder / TRACKING) | {key: tracked}
        write_sealed_json(folder / TRACKING, {"trackers": {k: asdict(each) for k, each in known.items()}})


def _read(path: Path) -> dict[str, TrackedRun]:
    if not path.exists():
        return {}
    try:
        return TypeAdapter(dict[str, TrackedRun]).validate_python(read_sealed_json(path).get("trackers"))
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {path}: {error}; without it, trackers begin new tracked runs") from None


class Tracker(ABC):
    """A watcher that logs a run to a tool. Subclasses have `open`, `log`, `keep` and `end`.

    If the tool fails, the run goes on. Missing rounds are logged later: in the next round, or when the run is resumed.
    """

    called: ClassVar[str]  # the tool's name in sentences
    extra: ClassVar[str]  # of fedhm that installs the tool
    module: ClassVar[str]  # of the tool, which must be installed
    takes_back: ClassVar[bool] = False  # the tool can forget rounds that were rewound

    def __init__(self, place: str, *, models: bool = True) -> None:
        if find_spec(self.module) is None:
            raise FedhmError(f"{self.called} is not installed: {how_to_install(self.extra)}")
        self._key = f"{self.extra} {place}"
        self._models = models
        self._folder: Path | None = None
        self._run = ""
        self._missing: list[Record] = []
        self._fails = self._open = self._complete = False

    @abstractmethod
    def open(self, about: About, name: str, run: str, first: int) -> str:
        """Begin a tracked run, or continue `run` with round `first`. Return its identifier."""

    @abstractmethod
    def log(self, found: Mapping[str, float], round_number: int) -> None:
        """Log the numbers of a round."""

    @abstractmethod
    def keep(self, files: Sequence[Path]) -> None:
        """Keep the models of the tiers as artefacts, if the tool has artefacts."""

    @abstractmethod
    def end(self, complete: bool) -> None:
        """Close the tracked run in this process. It may continue later unless it is complete."""

    def begun(self, about: About) -> None:
        self._folder, done = about.folder, len(about.records)
        known = _load(about.folder, self._key)
        if known.rounds > done and not self.takes_back:
            known = (
                TrackedRun()
            )  # some of its rounds were rewound, which the tool cannot forget: begin another tracked run
        held = min(known.rounds, done)
        name = about.folder.resolve().name if about.folder else about.config.method.name
        try:
            self._run = self.open(about, name, known.run, held + 1)
        except FedhmError:
            raise
        except Exception as error:  # whatever the tool raises
            raise FedhmError(f"{self.called} cannot be used: {_reason(error)}") from error
        self._open, self._complete = True, False
        _save(self._folder, self._key, TrackedRun(self._run, held))
        self._missing = list(about.records[held:])
        self._log_missing()

    def started(self, done: int, rounds: int) -> None:  # noqa: B027
        """Do nothing: `begun` had all of this."""

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:  # noqa: B027
        """Do nothing: trackers log whole rounds."""

    def round_done(self, record: Record) -> None:
        self._missing.append(record)
        self._log_missing()

    def ended(self, networks: Mapping[str, nn.Module]) -> None:
        self._log_missing()
        try:
            if self._models and not self._fails:
                with TemporaryDirectory(prefix="fedhm-") as scratch:
                    files = {tier: tier_file(Path(scratch), tier) for tier in networks}
                    for tier, network in networks.items():
                        save_tier(files[tier], network, tier)
                    self.keep(list(files.values()))
        except Exception as error:  # whatever the tool raises: the run is done
            self._warn(error, "the models are not there")
        self._complete = not self._missing

    def close(self) -> None:
        open_run, self._open = self._open, False
        try:
            if open_run:
                self.end(self._complete)
        except Exception as error:  # whatever the tool raises: the run is over
            self._warn(error, "not all of the run may be there")

    def _log_missing(self) -> None:
        """Log all rounds that the tracked run does not have yet."""
        try:
            while self._missing:
                record = self._missing[0]
                self.log(values(record), record.round)
                self._missing.pop(0)
                _save(self._folder, self._key, TrackedRun(self._run, record.round))
            self._fails = False
        except Exception as error:  # whatever the tool raises: no round is lost by it
            if not self._fails:
                self._warn(error, "the run goes on, and missing rounds are logged later")
            self._fails = True

    def _warn(self, error: Exception, outcome: str) -> None:
        warn(f"{self.called} fails ({_reason(error)}); {outcome}", FedhmWarning, stacklevel=3)


def _reason(error: Exception) -> str:
    """Return a tool's error in one line. Some tools raise whole paragraphs."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return os_error_sentence(error)
    return printable(str(error) or repr(error), MAX_ERROR_LENGTH)


class TensorBoard(Tracker):
    """Write event files with torch's own client, each run in a folder of its own below `folder`."""

    called: ClassVar = "TensorBoard"
    extra: ClassVar = "tensorboard"
    module: ClassVar = "tensorboard"
    takes_back: ClassVar = True  # `purge_step` voids the events of later rounds

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


MAX_REQUEST_ITEMS = 100  # parameters, or metrics, of one request
MAX_PARAMETER_LENGTH = 500  # characters of a parameter
# MLflow's own defaults retry for minutes, while the run waits. Values that users set stay.
RETRY_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MLflow(Tracker):
    """Log to the MLflow at `uri`, a server, a database or a folder, in an experiment of this name."""

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
        self._doubtful = 0  # a round that MLflow may have got in part when the run was killed

    def open(self, about: About, name: str, run: str, first: int) -> str:
        for key, value in RETRY_DEFAULTS.items():
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
        params = [Param(key, str(value)[:MAX_PARAMETER_LENGTH]) for key, value in settings(about.config).items()]
        for start in range(0, len(params), MAX_REQUEST_ITEMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_REQUEST_ITEMS])
        return self._id

    def log(self, found: Mapping[str, float], round_number: int) -> None:
        from mlflow.entities import Metric

        names = list(found)
        if round_number == self._doubtful:
            names = [name for name in names if not self._has(name, round_number)]
        self._doubtful = round_number  # until all of its numbers are there
        now = int(time.time() * 1000)
        metrics = [Metric(name, found[name], now, round_number) for name in names]
        for start in range(0, len(metrics), MAX_REQUEST_ITEMS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MAX_REQUEST_ITEMS])

    def _has(self, name: str, round_number: int) -> bool:
        return any(metric.step == round_number for metric in self._client.get_metric_history(self._id, name))

    def keep(self, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._id, str(file), "models")

    def end(self, complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")


class Wandb(Tracker):
    """Log to a project of Weights & Biases. Offline, logs stay in the run's folder until `wandb sync` sends them."""

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
            reinit="create_new",  # a run that was interrupted in this process is another one
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


def trackers(config: TrackingConfig | None) -> list[Tracker]:
    """Make the trackers that a config names. They begin with their run; a tool that is not installed is refused."""
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

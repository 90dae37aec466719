"""Weights & Biases, online or offline, by wandb's own client."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedhm.server.watcher import About
from fedhm.tracking.tracker import Tracker
from fedhm.tracking.values import settings


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

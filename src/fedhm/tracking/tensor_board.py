"""TensorBoard: event files in a folder, written by torch's own client."""

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fedhm.server.watcher import About
from fedhm.tracking.tracker import Tracker

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

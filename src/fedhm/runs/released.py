"""How many rounds of a private run have counted: ε counts each of them once, so none may come about a second time.

A record without its checkpoint is what a run leaves that was killed, and also what is left where somebody removed the
newest checkpoint. Only in the first case may the round be repeated; this file, written after the checkpoint, tells.
"""

from pathlib import Path

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically

FILE = "privacy.rounds"


def note_released(folder: Path, rounds: int) -> None:
    write_atomically(folder / FILE, f"{rounds}\n")


def check_none_repeats(folder: Path, done: int) -> None:
    """Refuse to resume a private run after round `done` if later ones have counted."""
    path = folder / FILE
    try:
        released = int(path.read_text()) if path.exists() else 0  # not there in runs of earlier versions
    except (OSError, ValueError):
        raise FedhmError(f"{path} is damaged: it must hold the number of rounds that a private run has done") from None
    if released > done:
        raise FedhmError(
            f"{folder} holds a private run, of which no round can be taken back: its ε counts each of them once. It "
            f"has done {released}, and the checkpoint of the last is not there: put it back, or start another run"
        )

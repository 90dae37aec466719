"""The secret of a private run: its noise and its sampling follow from it, so a resumed run repeats them exactly.

A run's seed stands in its config, and whoever knows where noise comes from can take it away again. So this comes from
the operating system when the run starts, and lies in a file of its own that only its owner can read.
"""

import os
import secrets
from pathlib import Path

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically

SECRET_FILE = "privacy.secret"
LENGTH = 32  # bytes


def new_secret() -> bytes:
    """Return a secret that nobody else has."""
    return secrets.token_bytes(LENGTH)


def read_secret(folder: Path, resumed: bool) -> bytes:
    """Return the secret in a run's folder; a run that is not `resumed` makes one if it has none."""
    path = folder / SECRET_FILE
    try:
        if not resumed and not path.exists():
            _write(path, new_secret())
        found = path.read_bytes()
    except OSError as error:
        raise FedhmError(
            f"cannot read {path}: {error.strerror}; put it back, since without it a private run cannot be resumed"
        ) from None
    if len(found) != LENGTH:
        raise FedhmError(f"{path} is damaged: it must hold {LENGTH} bytes; without it a private run cannot be resumed")
    return found


def _write(path: Path, secret: bytes) -> None:
    """Write the file whole or not at all, as others are, but readable by its owner only from the first byte on."""
    beside = path.with_name(path.name + ".tmp")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


# How many rounds of a private run have counted: ε counts each of them once, so none may come about a second time.
#
# A record without its checkpoint is what a run leaves that was killed, and also what is left where somebody removed
# the newest checkpoint. Only in the first case may the round be repeated; this file, written after the checkpoint,
# tells.

ROUNDS_FILE = "privacy.rounds"


def write_round_count(folder: Path, rounds: int) -> None:
    write_atomically(folder / ROUNDS_FILE, f"{rounds}\n")


def check_no_round_repeats(folder: Path, done: int) -> None:
    """Refuse to resume a private run after round `done` if later ones have counted."""
    path = folder / ROUNDS_FILE
    try:
        released = int(path.read_text()) if path.exists() else 0  # not there until the first round counts
    except (OSError, ValueError):
        raise FedhmError(f"{path} is damaged: it must hold the number of rounds that a private run has done") from None
    if released > done:
        raise FedhmError(
            f"{folder} holds a private run, of which no round can be taken back: its ε counts each of them once. It "
            f"has done {released}, and the checkpoint of the last is not there: put it back, or start another run"
        )

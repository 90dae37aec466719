"""The secret of a private run, and the number of its rounds.

The secret seeds the run's noise and its sampling, so that a resumed run repeats them exactly. The seed in the config
would not do: noise from a known seed can be subtracted again. So the secret comes from the operating system, and only
the owner can read its file.

ε counts each round once, so no round may run twice. A record without a checkpoint may come from a killed run, whose
round may be repeated, or from a removed checkpoint. The number of rounds is written after the checkpoint and tells
these two apart.
"""

import os
import secrets
from pathlib import Path

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically

SECRET_FILE = "privacy.secret"
ROUNDS_FILE = "privacy.rounds"
LENGTH = 32  # bytes


def new_secret() -> bytes:
    """Return a new random secret."""
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
    """Write the file whole or not at all. From the first byte, only its owner can read it."""
    beside = path.with_name(path.name + ".tmp")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def write_round_count(folder: Path, rounds: int) -> None:
    write_atomically(folder / ROUNDS_FILE, f"{rounds}\n")


def check_no_round_repeats(folder: Path, done: int) -> None:
    """Refuse to resume a private run after round `done` if later rounds have counted."""
    path = folder / ROUNDS_FILE
    try:
        released = int(path.read_text()) if path.exists() else 0  # written with the first round
    except (OSError, ValueError):
        raise FedhmError(f"{path} is damaged: it must hold the number of rounds that a private run has done") from None
    if released > done:
        raise FedhmError(
            f"{folder} holds a private run, which cannot be rewound: its ε counts each round once. It has done "
            f"{released} rounds, and the checkpoint of the last is missing: put it back, or start another run"
        )

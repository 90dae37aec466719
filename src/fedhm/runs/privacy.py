"""The secret of a private run, and the number of its rounds.

The secret seeds the run's noise and its sampling, so that a resumed run repeats them exactly. The seed in the config
would not do: noise from a known seed can be subtracted again. So the secret comes from the operating system, and only
the owner can read its file.

ε counts each round once, so no round may run twice. A record without a checkpoint may come from a killed run, whose
round may be repeated, or from a removed checkpoint. The number of rounds is written after the checkpoint and tells
these two apart.
"""

import hashlib
import os
import secrets
from pathlib import Path

from fedhm.errors import FedhmError
from fedhm.machine.files import create_beside, os_error_reason, read_regular, write_atomically
from fedhm.machine.seal import UNSEALED, read_sealed, seal

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
        found = read_regular(path)
    except OSError as error:
        raise FedhmError(
            f"cannot read {path}: {os_error_reason(error)}; put it back: without it, a private run cannot be resumed"
        ) from None
    secret = found[:LENGTH]
    if found != secret + _checksum(secret):
        raise FedhmError(f"{path} is damaged; without it a private run cannot be resumed")
    return secret


def _write(path: Path, secret: bytes) -> None:
    """Write the file whole or not at all. From the first byte, only its owner can read it."""
    with create_beside(path, 0o600) as file:
        file.write(secret + _checksum(secret))
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def _checksum(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def write_round_count(folder: Path, rounds: int) -> None:
    write_atomically(folder / ROUNDS_FILE, seal(f"{rounds} {UNSEALED}\n".encode()))


def read_round_count(folder: Path) -> int:
    """Return how many rounds of a private run count."""
    path = folder / ROUNDS_FILE
    try:
        return int(read_sealed(path).split()[0])
    except FileNotFoundError:  # it is written with the first round
        return 0
    except (OSError, ValueError):
        raise FedhmError(f"{path} is damaged: it must hold the number of rounds that a private run has done") from None


def check_no_round_repeats(folder: Path, done: int) -> None:
    """Refuse to resume a private run after round `done` if later rounds have counted."""
    released = read_round_count(folder)
    if released > done:
        raise FedhmError(
            f"{folder} holds a private run, which cannot be rewound: its ε counts each round once. It has done "
            f"{released} rounds, and the checkpoint of the last is missing: put it back, or start another run"
        )

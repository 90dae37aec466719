"""Which tracked run belongs to a run, and how many of its rounds that has: `tracking.json` in the run's folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.runs.folder import TRACKING


@dataclass(frozen=True)
class Remembered:
    run: str = ""  # how the tool identifies the tracked run; empty: there is none yet
    rounds: int = 0


def recall(folder: Path | None, key: str) -> Remembered:
    """Return what is known of a tracker; nothing, if the run is not kept on disk."""
    return _read(folder / TRACKING).get(key, Remembered()) if folder else Remembered()


def remember(folder: Path | None, key: str, what: Remembered) -> None:
    if folder:
        known = _read(folder / TRACKING) | {key: what}
        write_atomically(folder / TRACKING, json.dumps({k: asdict(each) for k, each in known.items()}, indent=2))


def _read(path: Path) -> dict[str, Remembered]:
    if not path.exists():
        return {}
    try:
        return TypeAdapter(dict[str, Remembered]).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {path}: {error}; without it, trackers begin new tracked runs") from None

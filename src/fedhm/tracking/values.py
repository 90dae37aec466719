"""What trackers are told of a record: names and numbers."""

import re
from typing import Any

from fedhm.config.settings import Config
from fedhm.machine.places import file_name
from fedhm.server.record import Record

_ODD = re.compile(r"[^\w\-. /]")  # what some tracker refuses in names


def values(record: Record) -> dict[str, float]:
    """Return every number of a record that has a name: `accuracy/1-8`, `train_loss/full`, `diagnostics/kappa_uv`."""
    found: dict[str, float] = {
        "participants": len(record.participants),
        "dropped": len(record.dropped),
        "clipped": len(record.clipped),
        "attempts": record.attempts,
    }
    for tier, metrics in record.metrics.items():
        found |= {f"{name}/{_one_word(tier)}": value for name, value in metrics.items()}
    for tier, traffic in record.traffic.items():
        of_tier = {"train_loss": traffic.loss, "bytes_down": traffic.down, "bytes_up": traffic.up, "macs": traffic.macs}
        found |= {f"{name}/{_one_word(tier)}": value for name, value in of_tier.items()}
    for tier, at_clients in record.clients.items():
        for what in ("mean", "median", "worst_tenth"):
            of_clients = getattr(at_clients.overall, what)
            found |= {f"clients_{what}_{name}/{_one_word(tier)}": value for name, value in of_clients.items()}
    found |= {f"diagnostics/{_one_word(name)}": value for name, value in record.diagnostics.items()}
    found |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    if record.epsilon is not None:
        found["epsilon"] = record.epsilon
    if record.simulated is not None:
        found["simulated_seconds"] = record.simulated.seconds
    return {_ODD.sub("_", name): float(value) for name, value in found.items()}


def settings(config: Config) -> dict[str, Any]:
    """Return the settings by their dotted keys, without those of the tracker itself."""
    return {key: value for key, value in config.dotted().items() if not key.startswith("tracking.")}


def _one_word(name: str) -> str:
    """Return a tier's name as its files are called: a slash would make a folder of it."""
    return file_name(name)

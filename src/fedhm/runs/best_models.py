"""Every tier's model after a run's best round, in models/best-round-N beside those after its last one.

They are written before the round counts, so that they are whole once it does. Those of other rounds are removed after
that: whenever a run is killed, the models of the round that is best by its records are there.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from fedhm.errors import FedhmError
from fedhm.machine.files import read_tensors
from fedhm.networks.exchange import load
from fedhm.runs.tier_files import save_tier, tier_file

_NAME = re.compile(r"best-round-(\d+)")


def save_best(models: Path, round_number: int, networks: Mapping[str, nn.Module]) -> None:
    for tier, network in networks.items():
        save_tier(tier_file(_folder(models, round_number), tier), network, tier)


def keep_only(models: Path, round_number: int) -> None:
    """Remove the models of rounds that were best once, now that a better one counts; of round 0, there is none yet."""
    for number in _kept(models) if round_number else ():
        if number != round_number:
            shutil.rmtree(_folder(models, number))


def kept_best(models: Path, rounds: int) -> int:
    """Return the round whose models are kept as the best, of a run that has done so many; 0 if there is none."""
    return max((number for number in _kept(models) if number <= rounds), default=0)


def load_best(models: Path, round_number: int, networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Put the kept models of a round into networks of their tiers; return none, where they were moved elsewhere."""
    if round_number not in _kept(models):
        return {}
    loaded: dict[str, nn.Module] = {}
    for tier, network in networks.items():
        file = tier_file(_folder(models, round_number), tier)
        try:
            loaded[tier] = load(network, read_tensors(file)[0])
        except (OSError, ValueError, FedhmError) as error:
            raise FedhmError(
                f"cannot read {file}: {error}; put it back, or remove {file.parent} to do without the models of the "
                "best round"
            ) from None
    return loaded


def best_round_of(path: Path) -> int:
    """Return the round whose models lie in a folder, by its name; 0 for all else."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _folder(models: Path, round_number: int) -> Path:
    return models / f"best-round-{round_number}"


def _kept(models: Path) -> list[int]:
    return [number for path in models.glob("best-round-*") if (number := best_round_of(path))]

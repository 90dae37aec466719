"""A tier's model as a file: safetensors, whose header has all that tells its network from the full one."""

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedhm.adapters.adapted import describe_adapter, rebuild_adapted
from fedhm.errors import FedhmError
from fedhm.lowrank.hadamard import Hadamard
from fedhm.lowrank.hybrid import plan_of, to_hadamard, to_hybrid
from fedhm.lowrank.plan import RankPlan
from fedhm.machine.files import file_name
from fedhm.machine.tensors import read_shapes, read_tensors, write_tensors
from fedhm.networks.exchange import exchanged_tensors, load
from fedhm.networks.structure import copy_network
from fedhm.widths.plan import resize, sizes_of
from fedhm.widths.wrappers import Ensemble

FORMAT = "fedhm-tier-1"
_NOT_LEARNT = ("running_mean", "running_var")


@dataclass(frozen=True)
class Layer:
    """What a tier's network has of a layer."""

    parameters: int = 0
    rank: int | None = None  # None: it is dense


def tier_file(folder: Path, tier: str) -> Path:
    """Return where the model of a tier lies in a folder of models."""
    return folder / f"{file_name(tier)}.safetensors"


def save_tier(path: Path, network: nn.Module, tier: str) -> None:
    write_tensors(path, exchanged_tensors(network), {"format": FORMAT, "tier": tier, **_description(network)})


def load_tier(path: str | Path, model: nn.Module) -> nn.Module:
    """Load the network of a tier that a run saved, rebuilt from the full `model`'s architecture, for evaluation."""
    try:
        tensors, header = read_tensors(Path(path))
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {path}: {error}") from None
    if header.get("format") != FORMAT:
        raise FedhmError(f"{path} is not a tier's model saved by this library")
    try:
        network = _rebuilt(model, header, len(tensors))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FedhmError(f"{path} has a header that describes no network: {error!r}") from None
    if missing := set(exchanged_tensors(network)) - set(tensors):
        raise FedhmError(f"{path} is of another model: it has no '{min(missing)}'")
    return load(network, tensors).eval()


def _description(network: nn.Module) -> dict[str, Any]:
    if (adapter := describe_adapter(network)) is not None:
        return {"adapter": adapter}
    if isinstance(network, Ensemble):
        return {**_description(network.members[0]), "members": len(network.members)}
    plan, composed = plan_of(network), plan_of(network, Hadamard)
    return {"ranks": plan.ranks, "form": plan.form, "hadamard": composed.ranks, "sizes": sizes_of(network)}


def _rebuilt(model: nn.Module, header: dict[str, Any], tensors: int) -> nn.Module:
    if "adapter" in header:
        return rebuild_adapted(model, header["adapter"])
    narrow = copy_network(model)
    layers, full = dict(narrow.named_modules()), sizes_of(model)
    for name, (outputs, inputs) in header["sizes"].items():
        if name in full and full[name] != [outputs, inputs]:
            if not all(
                type(n) is int and 1 <= n <= most for n, most in zip((outputs, inputs), full[name], strict=True)
            ):
                raise ValueError(f"{name} cannot have {outputs} outputs and {inputs} inputs")
            resize(layers[name], outputs, inputs)
    plan = RankPlan(header["ranks"], header["form"])
    network = to_hadamard(to_hybrid(narrow, plan, spectral=False), header["hadamard"])
    members = header.get("members")
    if members is not None and (type(members) is not int or not 1 <= members <= tensors):  # each has some of them
        raise ValueError(f"{members} members of {tensors} tensors")
    return Ensemble(copy_network(network) for _ in range(members)) if members else network


def read_layers(path: Path) -> dict[str, Layer]:
    """Read the layers of a tier's network off its file, without the weights; there are none where it cannot be read.

    It is for reports only, which a damaged model shall not keep from being written.
    """
    try:
        shapes, header = read_shapes(path)
        ranks = {**header.get("ranks", {}), **header.get("hadamard", {})}
    except (OSError, ValueError, TypeError, FedhmError):
        return {}
    layers: dict[str, Layer] = {}
    for name, shape in shapes.items():
        layer, _, last = name.partition(".parametrizations.")[0].rpartition(".")
        if last not in _NOT_LEARNT:
            rank = ranks.get(re.sub(r"^members\.\d+\.", "", layer))  # of an ensemble, all members have the same
            known = layers.get(layer, Layer()).parameters
            layers[layer] = Layer(known + math.prod(shape), rank if type(rank) is int else None)
    return layers


# Every tier's model after a run's best round, in models/best-round-N beside those after its last one.
#
# They are written before the round counts, so that they are whole once it does. Those of other rounds are removed
# after that: whenever a run is killed, the models of the round that is best by its records are there.

_NAME = re.compile(r"best-round-(\d+)")


def save_best_models(models: Path, round_number: int, networks: Mapping[str, nn.Module]) -> None:
    for tier, network in networks.items():
        save_tier(tier_file(_folder(models, round_number), tier), network, tier)


def remove_other_best_models(models: Path, round_number: int) -> None:
    """Remove the models of rounds that were best once, now that a better one counts; of round 0, there is none yet."""
    for number in _kept(models) if round_number else ():
        if number != round_number:
            shutil.rmtree(_folder(models, number))


def best_round_on_disk(models: Path, rounds: int) -> int:
    """Return the round whose models are kept as the best, of a run that has done so many; 0 if there is none."""
    return max((number for number in _kept(models) if number <= rounds), default=0)


def load_best_models(models: Path, round_number: int, networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
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

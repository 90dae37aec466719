"""Models on disk: one safetensors file a tier, with a header that describes how its network differs from the full one.

models/ holds the models after the last round, and models/best-round-N those after the best round. Best models are
written before the round counts, and those of former best rounds are removed afterwards. So a killed run always has the
models of the round that is best by its records.
"""

import math
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedhm.adapters.adapted import describe_adapter, rebuild_adapted
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.lowrank.hadamard import Hadamard
from fedhm.lowrank.hybrid import plan_of, to_hadamard, to_hybrid
from fedhm.lowrank.plan import RankPlan
from fedhm.machine.files import file_name
from fedhm.machine.tensors import read_shapes, read_tensors, write_tensors
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.networks.structure import copy_network
from fedhm.widths.plan import resize, sizes_of
from fedhm.widths.wrappers import Ensemble

FORMAT = "fedhm-tier-2"
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Layer:
    """A layer of a tier's network."""

    parameters: int = 0
    rank: int | None = None  # None: dense


def tier_file(folder: Path, tier: str) -> Path:
    """Return the file of a tier's model in a folder of models."""
    return folder / f"{file_name(tier)}.safetensors"


def save_tier(path: Path, network: nn.Module, tier: str, run: str = "") -> None:
    """Write the network of a tier; `run` is the fingerprint of its run."""
    header = {"format": FORMAT, "run": run, "tier": tier, **_description(network)}
    write_tensors(path, exchanged_tensors(network), header)


def load_tier(path: str | Path, model: nn.Module, tier: str = "", run: str = "") -> nn.Module:
    """Load the network of a tier that a run saved, rebuilt from the full `model`'s architecture, for evaluation.

    With `tier` and `run`, a run's fingerprint, the model of another tier or run is refused.
    """
    tensors, header = read_tier(Path(path), tier, run)
    try:
        network = _rebuilt(model, header, len(tensors))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FedhmError(f"{path} has a header that describes no network: {error!r}") from None
    if missing := set(exchanged_tensors(network)) - set(tensors):
        raise FedhmError(f"{path} is of another model: it has no '{min(missing)}'")
    return load(network, tensors).eval()


def read_tier(path: Path, tier: str = "", run: str = "") -> tuple[Tensors, dict[str, Any]]:
    """Read the tensors and the header of a tier's model; refuse that of another tier or run, if these are given."""
    try:
        tensors, header = read_tensors(path)
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {path}: {error}") from None
    _check_header(path, header, tier, run)
    return tensors, header


def _check_header(path: Path, header: Mapping[str, Any], tier: str, run: str) -> None:
    if header.get("format") != FORMAT:
        raise FedhmError(f"{path} is not a tier's model saved by this version of the library")
    if tier and header.get("tier") != tier:
        raise FedhmError(f"{path} is the model of tier {header.get('tier')}, not of {tier}")
    if run and header.get("run") != run:
        raise FedhmError(f"{path} is a model of another run")


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
    if members is not None and (type(members) is not int or not 1 <= members <= tensors):  # every member has tensors
        raise ValueError(f"{members} members of {tensors} tensors")
    return Ensemble(copy_network(network) for _ in range(members)) if members else network


def read_layers(path: Path, tier: str = "", run: str = "") -> dict[str, Layer]:
    """Read the layers of a tier's network from its file, without the weights; empty if there is no such file.

    Only reports use it. A damaged model does not prevent a report: a warning says what the report lacks.
    """
    try:
        shapes, header = read_shapes(path)
        _check_header(path, header, tier, run)
        ranks = {**header.get("ranks", {}), **header.get("hadamard", {})}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, FedhmError) as error:
        warnings.warn(
            f"the report does without the layers of {path}, which cannot be read: {error}", FedhmWarning, stacklevel=2
        )
        return {}
    layers: dict[str, Layer] = {}
    for name, shape in shapes.items():
        layer, _, last = name.partition(".parametrizations.")[0].rpartition(".")
        if last not in _STATISTICS:
            rank = ranks.get(re.sub(r"^members\.\d+\.", "", layer))  # of an ensemble, all members have the same
            known = layers.get(layer, Layer()).parameters
            layers[layer] = Layer(known + math.prod(shape), rank if type(rank) is int else None)
    return layers


_NAME = re.compile(r"best-round-(\d+)")


def save_best_models(models: Path, round_number: int, networks: Mapping[str, nn.Module], run: str = "") -> None:
    for tier, network in networks.items():
        save_tier(tier_file(_folder(models, round_number), tier), network, tier, run)


def remove_other_best_models(models: Path, round_number: int) -> None:
    """Remove the models of former best rounds; `round_number` is the best round, or 0 if there is none."""
    for number in _best_rounds(models) if round_number else ():
        if number != round_number:
            shutil.rmtree(_folder(models, number))


def best_round_on_disk(models: Path, rounds: int) -> int:
    """Return the round of the best models on disk, of a run that has done `rounds` rounds; 0 if there are none."""
    return max((number for number in _best_rounds(models) if number <= rounds), default=0)


def load_best_models(
    models: Path, round_number: int, networks: Mapping[str, nn.Module], run: str = ""
) -> dict[str, nn.Module]:
    """Load the best models of a round into networks of their tiers; empty if the files are not there."""
    if round_number not in _best_rounds(models):
        return {}
    loaded: dict[str, nn.Module] = {}
    for tier, network in networks.items():
        file = tier_file(_folder(models, round_number), tier)
        try:
            loaded[tier] = load(network, read_tier(file, tier, run)[0])
        except (ValueError, FedhmError) as error:
            raise FedhmError(
                f"{error}; put it back, or remove {file.parent} to do without the models of the best round"
            ) from None
    return loaded


def best_round_of(path: Path) -> int:
    """Return the round in the name of a folder of best models; 0 for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _folder(models: Path, round_number: int) -> Path:
    return models / f"best-round-{round_number}"


def _best_rounds(models: Path) -> list[int]:
    return [number for path in models.glob("best-round-*") if (number := best_round_of(path))]

"""A tier's model as a file: safetensors, with its rank plans in the header."""

from pathlib import Path

from torch import nn

from fedhm.errors import FedhmError
from fedhm.exchange import exchanged, load
from fedhm.files import read_tensors, write_tensors
from fedhm.lowrank.hadamard import Hadamard
from fedhm.lowrank.hybrid import plan_of, to_hadamard, to_hybrid

FORMAT = "fedhm-tier-1"


def save_tier(path: Path, network: nn.Module, tier: str) -> None:
    plans = {"ranks": plan_of(network), "hadamard": plan_of(network, Hadamard)}
    write_tensors(path, exchanged(network), {"format": FORMAT, "tier": tier, **plans})


def load_tier(path: str | Path, model: nn.Module) -> nn.Module:
    """The hybrid network that a run saved, rebuilt from the full `model`'s architecture; ready for evaluation."""
    try:
        tensors, header = read_tensors(Path(path))
    except (OSError, ValueError) as error:
        raise FedhmError(f"cannot read {path}: {error}") from None
    if header.get("format") != FORMAT:
        raise FedhmError(f"{path} is not a tier's model saved by this library")
    network = to_hadamard(to_hybrid(model, header["ranks"], spectral=False), header.get("hadamard", {}))
    if missing := set(exchanged(network)) - set(tensors):
        raise FedhmError(f"{path} is of another model: it has no '{min(missing)}'")
    return load(network, tensors).eval()

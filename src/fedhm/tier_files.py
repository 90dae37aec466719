"""A tier's model as a file: safetensors, with its rank plan in the header."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from fedhm.errors import FedhmError
from fedhm.exchange import exchanged, load
from fedhm.files import write_atomically
from fedhm.lowrank.hybrid import plan_of, to_hybrid


def save_tier(path: Path, network: nn.Module, tier: str) -> None:
    metadata = {"format": "fedhm-tier-1", "tier": tier, "ranks": json.dumps(plan_of(network))}
    tensors = {name: tensor.contiguous() for name, tensor in exchanged(network).items()}
    write_atomically(path, save(tensors, metadata))


def load_tier(path: str | Path, model: nn.Module) -> nn.Module:
    """The hybrid network that a run saved, rebuilt from the full `model`'s architecture; ready for evaluation."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FedhmError(f"cannot read {path}: {error}") from None
    if metadata.get("format") != "fedhm-tier-1":
        raise FedhmError(f"{path} is not a tier's model saved by this library")
    return load(to_hybrid(model, json.loads(metadata["ranks"]), spectral=False), tensors).eval()

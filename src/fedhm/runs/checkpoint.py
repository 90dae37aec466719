"""The server's state after each round, on disk: one safetensors file, written whole or not at all."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedhm.errors import FedhmError
from fedhm.machine.files import read_tensors, write_tensors
from fedhm.methods.method import State
from fedhm.networks.exchange import Tensors

FORMAT = "fedhm-checkpoint-1"
KEPT = 2  # the newest and the one before


@dataclass(frozen=True)
class Checkpoint:
    round: int
    state: State


def save_checkpoint(folder: Path, checkpoint: Checkpoint, run: str) -> None:
    """`run` identifies the run: its settings, data and initial model."""
    state = checkpoint.state
    tensors = {f"weights/{name}": t for name, t in state.weights.items()}
    tensors |= {f"memory/{name}": t for name, t in state.memory.items()}
    header = {
        "format": FORMAT,
        "round": checkpoint.round,
        "run": run,
        "diagnostics": state.diagnostics,
    }
    write_tensors(_path(folder, checkpoint.round), tensors, {**header, "sha256": _digest(tensors, header)})
    for old in _existing(folder)[:-KEPT]:
        old.unlink()


def newest_checkpoint(folder: Path, run: str) -> Checkpoint | None:
    existing = _existing(folder)
    return _read(existing[-1], run) if existing else None


def _read(path: Path, run: str) -> Checkpoint:
    try:
        tensors, header = read_tensors(path)
    except (OSError, ValueError) as error:
        raise FedhmError(f"the checkpoint {path} is damaged ({error}); {_way_out(path)}") from None
    if header.get("format") != FORMAT:
        raise FedhmError(f"{path} is not a checkpoint of this library")
    if header.pop("sha256", None) != _digest(tensors, header):
        raise FedhmError(f"the checkpoint {path} is damaged (its checksum is another); {_way_out(path)}")
    if header["run"] != run:
        raise FedhmError(f"the checkpoint {path} belongs to another run, with other settings, data or initial model")
    weights = {n.removeprefix("weights/"): t for n, t in tensors.items() if n.startswith("weights/")}
    memory = {n.removeprefix("memory/"): t for n, t in tensors.items() if n.startswith("memory/")}
    return Checkpoint(header["round"], State(weights, memory, header["diagnostics"]))


def _way_out(path: Path) -> str:
    if len(_existing(path.parent)) > 1:
        return "remove it to go on from the one before"
    return "remove it to start the run again"


def _path(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:06d}.safetensors"


def _existing(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"))


def _digest(tensors: Tensors, header: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

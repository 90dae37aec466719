"""What makes a run that very run: its settings, its data and the model that it starts from."""

import hashlib

import torch
from torch import Tensor

from fedhm.config import Config
from fedhm.data.federation import Federation
from fedhm.messages import Tensors


def fingerprint(config: Config, weights: Tensors, federation: Federation) -> str:
    """A checkpoint carries it, so that it is not gone on with under other circumstances."""
    digest = hashlib.sha256(f"{config.to_toml()}{federation.preprocessing}".encode())
    for name in sorted(weights):
        _add(digest, name, weights[name])
    for samples in [*federation.clients, federation.test]:
        _add(digest, "inputs", samples.inputs)
        _add(digest, "labels", samples.labels)
    return digest.hexdigest()[:32]


def _add(digest: "hashlib._Hash", name: str, tensor: Tensor) -> None:
    digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

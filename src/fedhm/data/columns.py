"""Several tensors for each sample, which a model takes by position or by name."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhm.machine.tensors import update_digest
from fedhm.networks.inputs import Inputs


@dataclass(frozen=True)
class Columns:
    """N samples of several tensors each.

    tensors  by name, each (N, …); tensors without names are called "0", "1", …
    named    the model takes them as keyword arguments; otherwise by position
    """

    tensors: Mapping[str, Tensor]
    named: bool

    @property
    def _first(self) -> Tensor:
        return next(iter(self.tensors.values()))

    def __len__(self) -> int:
        return len(self._first)

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the first tensor."""
        return self._first.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def ndim(self) -> int:
        return self._first.ndim

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def kind(self) -> str:
        return kind_of(self.batch())

    def to(self, device: torch.device) -> "Columns":
        return Columns({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.named)

    def __getitem__(self, indices: Tensor) -> "Columns":
        return Columns({name: tensor[indices] for name, tensor in self.tensors.items()}, self.named)

    def batch(self) -> Inputs:
        """Return all samples as a model takes them."""
        return dict(self.tensors) if self.named else tuple(self.tensors.values())

    def update_digest(self, digest: "hashlib._Hash") -> None:
        for name, tensor in self.tensors.items():
            update_digest(digest, tensor, f"{name}{self.named}{tuple(tensor.shape)}{tensor.dtype}")


def kind_of(batch: Inputs, shapes: bool = True) -> str:
    """Return the types of a batch's tensors in words, with the shapes of one sample unless these may differ."""

    def one(tensor: Tensor) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"shape {tuple(tensor.shape[1:])} and type {dtype}" if shapes else f"type {dtype}"

    if isinstance(batch, dict):
        return "; ".join(f"'{name}' of {one(tensor)}" for name, tensor in batch.items())
    return "; ".join(map(one, batch)) if isinstance(batch, tuple) else one(batch)


def concatenate_columns(parts: list[Columns]) -> Columns:
    """Return the samples of all parts, one after another."""
    first = parts[0]
    return Columns({name: torch.cat([part.tensors[name] for part in parts]) for name in first.tensors}, first.named)

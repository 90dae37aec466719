"""Token sequences of different lengths, stored one after another: token ids, attention masks, targets.

A batch is padded to its longest sequence. It is made of sequences of similar length, so that padding stays small.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.machine.tensors import update_digest
from fedhm.networks.saving import split_batches

IDS, MASK, TYPES, TARGETS = "input_ids", "attention_mask", "token_type_ids", "labels"
PADDING = {MASK: 0, TYPES: 0, TARGETS: -100}  # all other fields are padded with the padding token
POOL = 16  # batches that are drawn at random together and then sorted by length


@dataclass(frozen=True)
class Tokens:
    """N sequences: by field the numbers of all sequences, and the start of each sequence."""

    fields: Mapping[str, Tensor]  # (total length,), int64; `labels` are targets, and all else goes into the network
    starts: Tensor  # (N + 1,)
    padding: int = 0  # the token id of padding

    @classmethod
    def of(cls, sequences: Mapping[str, Sequence[Sequence[int]]], whose: str, padding: int = 0) -> "Tokens":
        """Return the tokens of lists, by field one list a sample; without a mask, all tokens count."""
        lengths = [len(sequence) for sequence in sequences[IDS]]
        if not lengths or min(lengths) < 1:
            raise FedhmError(f"{whose} has {'a sample without any token' if lengths else 'no samples'}")
        for name, given in sequences.items():
            if [len(sequence) for sequence in given] != lengths:
                raise FedhmError(f"the '{name}' of {whose} must be as long as its '{IDS}', sample by sample")
        try:
            flat = {n: torch.tensor([int(v) for s in given for v in s]) for n, given in sequences.items()}
        except (TypeError, ValueError, OverflowError):
            raise FedhmError(f"the tokens of {whose} must be whole numbers") from None
        for name in (IDS, TYPES):
            if name in flat and int(flat[name].min()) < 0:
                raise FedhmError(f"the '{name}' of {whose} must not be negative: there is a {int(flat[name].min())}")
        flat.setdefault(MASK, torch.ones_like(flat[IDS]))
        return cls(flat, torch.tensor([0, *lengths]).cumsum(0), padding)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    @property
    def shape(self) -> torch.Size:
        """Return the number of sequences and their median length."""
        return torch.Size((len(self), int(self.lengths.median()) if len(self) else 0))

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def ndim(self) -> int:
        return 2

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + sum(flat.nbytes for flat in self.fields.values())

    def to(self, device: torch.device) -> "Tokens":
        return Tokens(
            {name: flat.to(device) for name, flat in self.fields.items()}, self.starts.to(device), self.padding
        )

    @property
    def kind(self) -> str:
        return f"sequences of {', '.join(sorted(self.fields))}"

    def __getitem__(self, indices: Tensor) -> "Tokens":
        """Return some of the sequences."""
        lengths = self.lengths[indices]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        # the old place of every token
        places = torch.arange(int(starts[-1])) + (self.starts[indices] - starts[:-1]).repeat_interleave(lengths)
        return Tokens({name: flat[places] for name, flat in self.fields.items()}, starts, self.padding)

    def longest(self, indices: Tensor) -> int:
        """Return the length of the longest of some sequences."""
        return int(self.lengths[indices].max())

    def padded(self, indices: Tensor, longest: int) -> dict[str, Tensor]:
        """Return some of the sequences as tensors (B, T), padded on the right to the longest, of length T."""
        lengths = self.starts[indices + 1] - self.starts[indices]
        columns = torch.arange(longest, device=self.starts.device)
        there = columns < lengths[:, None]
        places = torch.where(there, self.starts[indices][:, None] + columns, 0)
        return {n: flat[places].masked_fill(~there, PADDING.get(n, self.padding)) for n, flat in self.fields.items()}

    def median_index(self) -> Tensor:
        """Return the index of a sequence of median length."""
        return self.lengths.argsort(stable=True)[(len(self) - 1) // 2 :][:1]

    def by_length(self, size: int) -> list[Tensor]:
        """Return batches of indices, the shortest sequences first."""
        return split_batches(self.lengths.argsort(stable=True), size)

    def buckets(self, size: int, generator: torch.Generator) -> list[Tensor]:
        """Return batches of indices in random order, each of sequences of similar length."""
        order = torch.randperm(len(self), generator=generator)
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(POOL * size)]
        batches = split_batches(torch.cat(pools), size)
        return [batches[number] for number in torch.randperm(len(batches), generator=generator).tolist()]

    def largest(self, name: str) -> int:
        """Return the largest number of a field; 0 if there is none."""
        return int(self.fields[name].max()) if name in self.fields and len(self.fields[name]) else 0

    def check_targets(self, whose: str) -> None:
        """Refuse sequences without a token to predict: nothing comes before the first one."""
        if TARGETS in self.fields and len(self):
            counted = self.fields[TARGETS] != PADDING[TARGETS]
            counted[self.starts[:-1]] = False
            if not bool(counted.any()):
                raise FedhmError(
                    f"{whose} has no token to predict: a text needs two tokens or more, and a target that is not "
                    f"{PADDING[TARGETS]}"
                )

    def with_padding_id(self, padding: int) -> "Tokens":
        """Return the same sequences with another padding token."""
        return self if padding == self.padding else Tokens(self.fields, self.starts, padding)

    def update_digest(self, digest: "hashlib._Hash") -> None:
        digest.update(f"{self.kind}{tuple(self.shape)}{self.padding}".encode())
        for tensor in (self.starts, *(self.fields[name] for name in sorted(self.fields))):
            update_digest(digest, tensor)


def concatenate_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Return the sequences of all parts, one after another."""
    lengths = torch.cat([part.lengths for part in parts])
    fields = {name: torch.cat([part.fields[name] for part in parts]) for name in parts[0].fields}
    return Tokens(fields, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), parts[0].padding)

"""Samples that are read when a batch needs them, from a data set with `__getitem__` and `__len__`.

Each epoch reads every item again. So random transforms are random, and the samples need not fit into memory.

Transforms draw from the global generators of torch, numpy and Python. These are seeded for each item, from the seed of
its batch and its index, and restored afterwards. So results depend neither on the number of workers nor on earlier
reads, and a resumed run repeats them.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from fedhm.config.objective import Objective
from fedhm.data.columns import kind_of
from fedhm.data.items import as_inputs, as_target, split_item
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.machine.tensors import update_digest
from fedhm.networks.inputs import Inputs, map_tensors, tensors_of
from fedhm.seeds import derive

CHUNK = 256  # targets that are converted together
MOST_PIXEL_SAMPLES = 1000  # images of a client by which lazily read images are normalised
DIGESTED = 4  # items that tell a data set from others, beside its length and its targets


class UnreadableSampleError(FedhmError):
    """A sample that cannot be read, or that cannot be learned from."""


@dataclass(frozen=True)
class LazyInputs:
    """The inputs of a data set, and its targets, which one read gives together.

    rows     (N,): the indices of the samples in the data set
    floats   the type of floating-point inputs: the model's
    collate  makes a batch of a list of items; None: tensors are stacked
    """

    dataset: Any
    rows: Tensor
    whose: str
    floats: torch.dtype
    objective: Objective
    collate: Callable[[list[Any]], Any] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def first(self) -> Inputs:
        """Return a batch of the first sample, or of the data set's first if there is none here."""
        rows = self.rows if len(self.rows) else torch.zeros(1, dtype=torch.int64)
        return self._batch(rows[:1].tolist(), 0)[0]

    @property
    def _tensor(self) -> Tensor:
        return tensors_of(self.first)[0]

    @property
    def is_one_tensor(self) -> bool:
        return isinstance(self.first, Tensor)

    @property
    def shape(self) -> torch.Size:
        """Return the shape of all samples, or of the first tensor if each has several."""
        return torch.Size((len(self), *self._tensor.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def ndim(self) -> int:
        return self._tensor.ndim

    @property
    def kind(self) -> str:
        return kind_of(self.first, shapes=self.collate is None)

    def __getitem__(self, indices: Tensor) -> "LazyInputs":
        return replace(self, rows=self.rows[indices])

    def read(self, indices: Tensor, seed: int) -> tuple[Inputs, Tensor]:
        """Return a batch of some samples, read now: the inputs and the targets."""
        return self._batch(self.rows[indices].tolist(), seed)

    def _batch(self, rows: Sequence[int], seed: int) -> tuple[Inputs, Tensor]:
        with _own_randomness():
            if self.collate is not None:
                return self._collated([self._item(row, seed) for row in rows], rows)
            parts = [self._sample(row, seed) for row in rows]
        inputs = _stacked([inputs for inputs, _ in parts], self.whose, rows)
        targets = _stacked([target for _, target in parts], self.whose, rows)
        assert isinstance(targets, Tensor)
        return inputs, self.objective.as_targets(targets, self.whose, self.floats)

    def _collated(self, items: list[Any], rows: Sequence[int]) -> tuple[Inputs, Tensor]:
        assert self.collate is not None
        try:
            given, target = split_item(self.collate(items), self.whose)
            inputs, targets = as_inputs(given), as_target(target)
        except FedhmError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise UnreadableSampleError(
                f"collate_fn of {self.whose} cannot make a batch of the samples {_listed(rows)}: {error!r}"
            ) from error
        if any(len(tensor) != len(items) for tensor in (*tensors_of(inputs), targets)):
            raise UnreadableSampleError(
                f"collate_fn of {self.whose} must return as many inputs and targets as it gets samples"
            )
        inputs = map_tensors(self._converted, inputs)
        self._check_finite(inputs, f"a batch with the samples {_listed(rows)}")
        return inputs, self.objective.as_targets(targets, self.whose, self.floats)

    def _item(self, row: int, seed: int) -> Any:
        _seed_all(derive(seed, "item", row))
        try:
            return self.dataset[row]
        except Exception as error:  # a user's data set may raise anything
            raise UnreadableSampleError(f"sample {row} of {self.whose} cannot be read: {error!r}") from error

    def _sample(self, row: int, seed: int) -> tuple[Inputs, Tensor]:
        given, target = split_item(self._item(row, seed), self.whose)
        try:
            inputs, found = map_tensors(self._converted, as_inputs(given)), as_target(target)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnreadableSampleError(
                f"sample {row} of {self.whose} must be a pair of an array and a class number, or numbers: {error}"
            ) from error
        self._check_finite(inputs, f"sample {row}")
        return inputs, found

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.floats) if tensor.is_floating_point() else tensor

    def _check_finite(self, inputs: Inputs, what: str) -> None:
        if not all(bool(tensor.isfinite().all()) for tensor in tensors_of(inputs) if tensor.is_floating_point()):
            raise UnreadableSampleError(
                f"{what} of {self.whose} holds NaN or infinite values: leave it out, or replace them"
            )

    def targets(self) -> Tensor:
        """Read all targets once, (N, …), as small as the objective can do with for its checks.

        Data sets of torchvision have their targets in a list. Otherwise every sample is read.
        """
        known = None if self.collate is not None else known_targets(self.dataset)
        if known is not None:
            return self.objective.as_targets(known[self.rows], self.whose, self.floats)
        parts = []
        for rows in self.rows.split(CHUNK):
            found = self._read_targets(rows.tolist()) if self.collate is None else self._batch(rows.tolist(), 0)[1]
            parts.append(self.objective.condensed(found))
        try:
            return torch.cat(parts)
        except RuntimeError as error:
            raise UnreadableSampleError(f"the targets of {self.whose} differ in shape or type: {error}") from error

    def _read_targets(self, rows: Sequence[int]) -> Tensor:
        found: list[Tensor] = []
        with _own_randomness():
            for row in rows:
                inputs, target = self._sample(row, 0)
                if (kind := kind_of(map_tensors(lambda tensor: tensor[None], inputs))) != kind_of(self.first):
                    raise UnreadableSampleError(
                        f"the samples of {self.whose} differ in shape or type: sample {row} has {kind}, the first "
                        f"{kind_of(self.first)}: bring them to one size first"
                    )
                found.append(target)
        stacked = _stacked(found, self.whose, rows)
        assert isinstance(stacked, Tensor)
        return self.objective.as_targets(stacked, self.whose, self.floats)

    def some_images(self) -> Iterator[Tensor]:
        """Yield some images (1, C, H, W), evenly spaced, by which all are normalised."""
        step = max(1, len(self) // MOST_PIXEL_SAMPLES)
        for row in self.rows[::step].split(1):
            inputs, _ = self._batch(row.tolist(), 0)
            assert isinstance(inputs, Tensor)
            yield inputs

    def warn_if_unrepeatable(self) -> None:
        """Warn if a data set draws from a generator of its own: then no result can be repeated."""
        if len(self) and not self._repeats(0):
            warn(
                f"{self.whose} gives another sample 0 at every read, by a generator of its own: runs on it cannot be "
                "repeated or resumed exactly; let its transforms draw from the global generators of torch, numpy or "
                "random, which are seeded for them",
                FedhmWarning,
                stacklevel=2,
            )

    def _repeats(self, place: int) -> bool:
        first, again = (self.read(torch.tensor([place]), 0) for _ in range(2))
        pairs = zip([*tensors_of(first[0]), first[1]], [*tensors_of(again[0]), again[1]], strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    def update_digest(self, digest: "hashlib._Hash") -> None:
        """Add what tells these samples from others: how many there are, and a few that are the same at every read."""
        update_digest(digest, self.rows, f"lazy {self.kind}")
        for place in range(0, len(self), max(1, len(self) // DIGESTED)):
            if self._repeats(place):
                for tensor in tensors_of(self.read(torch.tensor([place]), 0)[0]):
                    update_digest(digest, tensor)


def known_targets(dataset: Any) -> Tensor | None:
    """Return the targets of a data set that has them in a list, as those of torchvision do; None: read its samples."""
    if type(dataset) is Subset:
        inner = known_targets(dataset.dataset)
        return None if inner is None else inner[torch.as_tensor(list(dataset.indices), dtype=torch.int64)]
    listed = getattr(dataset, "targets", None)
    if listed is None or getattr(dataset, "target_transform", None) is not None:
        return None
    try:
        found = as_target(listed)
        with _own_randomness():
            first = as_target(split_item(dataset[0], "the data set")[1])
    except Exception:  # a user's data set may mean anything by the name
        return None
    same = found.ndim >= 1 and len(found) == len(dataset) and found[0].shape == first.shape
    return found if same and bool((found[0] == first).all()) else None


def _stacked(parts: Sequence[Inputs], whose: str, rows: Sequence[int]) -> Inputs:
    """Return a batch of single samples."""
    first = parts[0]
    try:
        if isinstance(first, dict):
            named = [part for part in parts if isinstance(part, dict)]
            return {name: torch.stack([part[name] for part in named]) for name in first}
        by_position = [torch.stack(each) for each in zip(*map(tensors_of, parts), strict=True)]
        return tuple(by_position) if isinstance(first, tuple) else by_position[0]
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise UnreadableSampleError(
            f"the samples {_listed(rows)} of {whose} differ in shape or type, and cannot be one batch: {error}"
        ) from error


def _listed(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:6])) + (" …" if len(rows) > 6 else "")


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Restore the global generators afterwards: dropout and other data use them, too."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)

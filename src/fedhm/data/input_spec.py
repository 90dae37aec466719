"""The type and shape of an input, for a server without samples, and a placeholder sample made from it.

The app states it, or the majority of the clients reports it. A client reports one line: `float32 3x32x32` for a tensor,
`attention_mask+input_ids 17` for token sequences of typical length 17.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.config.objective import Objective
from fedhm.data.columns import Columns
from fedhm.data.lazy import LazyInputs
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.data.text import FIELDS
from fedhm.data.tokens import IDS, Tokens
from fedhm.errors import FedhmError
from fedhm.machine.printable import printable
from fedhm.networks.inputs import Inputs, forward_batch, sample_shape

TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
MOST_AXES, MOST_NUMBERS, LONGEST_TEXT = (
    8,
    1 << 28,
    1 << 20,
)  # of one input; more is an attack on memory
_LINE = re.compile(r"([a-z0-9_+]{1,99})(?: ([0-9]{1,9}(?:x[0-9]{1,9})*))?")


@dataclass(frozen=True)
class InputSpec:
    """One input: the type and shape of a tensor, or the fields and the typical length of token sequences."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, samples: Samples) -> "InputSpec":
        inputs = samples.inputs
        if isinstance(inputs, Columns) or (isinstance(inputs, LazyInputs) and not inputs.is_one_tensor):
            raise FedhmError("inputs of several tensors have no input spec: give the server a test set")
        names = sorted(inputs.fields) if isinstance(inputs, Tokens) else [str(inputs.dtype).removeprefix("torch.")]
        return cls("+".join(names), tuple(inputs.shape[1:]))

    @classmethod
    def read(cls, line: str) -> "InputSpec":
        """Read a line, perhaps of a hostile client; anything but the spec of a possible input is refused."""
        found = _LINE.fullmatch(line)
        spec = cls(found[1], tuple(int(size) for size in (found[2] or "").split("x") if size)) if found else None
        if spec is None or not spec._possible:
            raise FedhmError(f"'{printable(line, 60)}' is no input spec: write it like 'float32 3x32x32'")
        return spec

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))}".rstrip()

    @property
    def _possible(self) -> bool:
        if self.is_text:
            return len(self.shape) == 1 and 0 < self.shape[0] <= LONGEST_TEXT
        if self.kind not in TYPES or len(self.shape) > MOST_AXES:
            return False
        return 0 < prod(self.shape) <= MOST_NUMBERS

    @property
    def is_text(self) -> bool:
        names = self.kind.split("+")
        return IDS in names and sorted(set(names) & set(FIELDS)) == names

    @property
    def comparable(self) -> tuple[str, tuple[int, ...]]:
        """Return the part that clients must agree on: the lengths of texts may differ."""
        return self.kind, () if self.is_text else self.shape

    def zeros(self) -> Tensor | Tokens:
        """Return an input of zeros."""
        if not self.is_text:
            return torch.zeros(self.shape, dtype=getattr(torch, self.kind))
        return Tokens.of({name: [[0] * self.shape[0]] for name in self.kind.split("+")}, "the sample of the server")


def majority_spec(reported: Mapping[int, InputSpec]) -> tuple[InputSpec, list[int]]:
    """Return the spec of more than half of the clients, and the clients that report another one.

    So a lying client decides nothing unless it is alone. The length of texts is the median of the majority's.
    """
    votes = Counter(spec.comparable for spec in reported.values())
    if not votes:
        raise FedhmError("no client reports an input spec: give the server inputs=")
    (most, times), *_ = votes.most_common(1)
    if 2 * times <= len(reported):
        lines = ", ".join(dict.fromkeys(str(spec) for spec in list(reported.values())[:5]))
        raise FedhmError(f"clients report different input specs ({lines}): give the server inputs=")
    majority = [spec for spec in reported.values() if spec.comparable == most]
    typical = sorted(majority, key=lambda spec: spec.shape)[(len(majority) - 1) // 2]
    return typical, sorted(client for client, spec in reported.items() if spec.comparable != most)


def placeholder_sample(
    inputs: Any, outputs: int, model: nn.Module, preprocessing: Preprocessing, objective: Objective, dtype: torch.dtype
) -> tuple[Samples, int]:
    """Return a sample of zeros, and the number of outputs.

    inputs   the shape of one input (uint8 if images are normalised, else `dtype`), an example array, or one token
             sequence
    outputs  the number of classes, or of numbers to predict; 0: as many as the model's outputs
    """
    one = inputs if isinstance(inputs, Tokens) else _zeros(inputs, dtype, bool(preprocessing.mean))[None]
    sample = Samples(one, torch.zeros(1, dtype=torch.int64))
    preprocessing.check(sample)
    batch, _ = Feed(sample, preprocessing).one()
    outputs = outputs or _outputs(model, batch)
    return Samples(one, _targets(objective, outputs, dtype)), outputs


def _zeros(inputs: Any, dtype: torch.dtype, normalised: bool) -> Tensor:
    if hasattr(inputs, "dtype"):
        given = torch.as_tensor(inputs)
        return torch.zeros(given.shape, dtype=dtype if given.is_floating_point() else given.dtype)
    try:
        return torch.zeros(tuple(inputs), dtype=torch.uint8 if normalised else dtype)
    except (TypeError, RuntimeError):
        raise FedhmError(
            f"inputs must be the shape of one input, such as (3, 32, 32), or an array like one, not {inputs!r}"
        ) from None


@torch.no_grad()
def _outputs(model: nn.Module, batch: Inputs) -> int:
    try:
        return int(forward_batch(model.eval(), batch).shape[1:].numel())
    except Exception as error:  # a user's model may raise anything
        raise FedhmError(f"the model does not accept one input of shape {sample_shape(batch)}: {error}") from error


def _targets(objective: Objective, outputs: int, dtype: torch.dtype) -> Tensor:
    """Return one target, in the first shape that the objective takes: a single number, or one for each output."""
    for shape in ((1,), (1, outputs)):
        try:
            targets = objective.as_targets(torch.zeros(shape), "the sample of the server", dtype)
            objective.check(targets, outputs, "the sample of the server")
        except FedhmError:
            continue
        return targets
    raise FedhmError(f"the objective '{objective.name}' takes no target for a model with {outputs} outputs: give test=")

"""What samples are like, where the server has none: made up from an input's shape and what a model gives for it.

The shape is told by whoever writes the app, or by most of the clients, each in a line: `float32 3x32x32` for a tensor,
`attention_mask+input_ids 17` for sequences of tokens, of which the length is a typical one.
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
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.data.text import READ
from fedhm.data.tokens import IDS, Tokens
from fedhm.errors import FedhmError
from fedhm.machine.printable import printable
from fedhm.networks.inputs import Inputs, forward_batch, sample_shape

TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
MOST_AXES, MOST_NUMBERS, LONGEST_TEXT = 8, 1 << 28, 1 << 20  # of one input; beyond, somebody wants the server's memory
_LINE = re.compile(r"([a-z0-9_+]{1,99})(?: ([0-9]{1,9}(?:x[0-9]{1,9})*))?")


@dataclass(frozen=True)
class InputSpec:
    """What one input is like: a tensor's type and shape, or the names in a sequence of tokens and a typical length."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, samples: Samples) -> "InputSpec":
        inputs = samples.inputs
        names = sorted(inputs.fields) if isinstance(inputs, Tokens) else [str(inputs.dtype).removeprefix("torch.")]
        return cls("+".join(names), tuple(inputs.shape[1:]))

    @classmethod
    def read(cls, line: str) -> "InputSpec":
        """Read a line, which a client may have written: refuse what is no form, or that of no input that there is."""
        found = _LINE.fullmatch(line)
        form = cls(found[1], tuple(int(size) for size in (found[2] or "").split("x") if size)) if found else None
        if form is None or not form._possible:
            raise FedhmError(f"'{printable(line, 60)}' does not say what an input is like; 'float32 3x32x32' would")
        return form

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
        return IDS in names and sorted(set(names) & set(READ)) == names

    @property
    def comparable(self) -> tuple[str, tuple[int, ...]]:
        """Return what clients have to agree on: not how long texts are."""
        return self.kind, () if self.is_text else self.shape

    def zeros(self) -> Tensor | Tokens:
        """Return an input of this form."""
        if not self.is_text:
            return torch.zeros(self.shape, dtype=getattr(torch, self.kind))
        return Tokens.of({name: [[0] * self.shape[0]] for name in self.kind.split("+")}, "the sample of the server")


def majority_spec(said: Mapping[int, InputSpec]) -> tuple[InputSpec, list[int]]:
    """Return the form that more than half of the clients have, and who says otherwise.

    So one that lies decides nothing unless it is alone. Of texts, the length is the median of what most say.
    """
    votes = Counter(form.comparable for form in said.values())
    if not votes:
        raise FedhmError("no client says what its inputs are like: tell the server by inputs=")
    (most, times), *_ = votes.most_common(1)
    if 2 * times <= len(said):
        lines = ", ".join(dict.fromkeys(str(form) for form in list(said.values())[:5]))
        raise FedhmError(f"clients do not agree on what an input is like ({lines}): tell the server by inputs=")
    theirs = [form for form in said.values() if form.comparable == most]
    typical = sorted(theirs, key=lambda form: form.shape)[(len(theirs) - 1) // 2]
    return typical, sorted(client for client, form in said.items() if form.comparable != most)


def placeholder_sample(
    inputs: Any, outputs: int, model: nn.Module, preprocessing: Preprocessing, objective: Objective, dtype: torch.dtype
) -> tuple[Samples, int]:
    """Return a sample of zeros, and how many outputs there are.

    inputs   the shape of one input, of uint8 images where these are normalised, else of `dtype`; or an array like one,
             or one sequence of tokens
    outputs  how many classes there are, or numbers to predict; 0: as many as the model gives for a sample
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
    except Exception as error:  # whatever a foreign model raises
        raise FedhmError(f"the model does not accept one input of shape {sample_shape(batch)}: {error}") from error


def _targets(objective: Objective, outputs: int, dtype: torch.dtype) -> Tensor:
    """Return one target, in the first form that the objective takes: a single number, or one for each output."""
    for shape in ((1,), (1, outputs)):
        try:
            targets = objective.as_targets(torch.zeros(shape), "the sample of the server", dtype)
            objective.check(targets, outputs, "the sample of the server")
        except FedhmError:
            continue
        return targets
    raise FedhmError(f"the objective '{objective.name}' takes no target for a model with {outputs} outputs: give test=")

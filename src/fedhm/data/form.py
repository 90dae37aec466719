"""What samples are like, where the server has none: made up from an input's shape and what a model gives for it."""

from typing import Any

import torch
from torch import Tensor, nn

from fedhm.config.sections.objective import Objective
from fedhm.data.batches import Feed, Preprocessing
from fedhm.data.samples import Samples
from fedhm.data.tokens import Tokens
from fedhm.errors import FedhmError
from fedhm.networks.inputs import Inputs, scores, shape_of


def made_up(
    inputs: Any, outputs: int, model: nn.Module, preprocessing: Preprocessing, objective: Objective, dtype: torch.dtype
) -> tuple[Samples, int]:
    """Return a sample of zeros, and how many outputs there are.

    inputs   the shape of one input, of uint8 images where these are normalised, else of `dtype`; or an array like one,
             or one sequence of tokens
    outputs  how many classes there are, or numbers to predict; 0: as many as the model gives for a sample
    """
    whole = torch.uint8 if preprocessing.mean else dtype
    one = inputs if isinstance(inputs, Tokens) else _zeros(inputs, whole)[None]
    batch, _ = Feed(Samples(one, torch.zeros(1, dtype=torch.int64)), preprocessing).one()
    outputs = outputs or _outputs(model, batch)
    return Samples(one, _targets(objective, outputs, dtype)), outputs


def _zeros(inputs: Any, dtype: torch.dtype) -> Tensor:
    if inputs is None:
        raise FedhmError("without test samples the server must be told the shape of an input: inputs=(3, 32, 32)")
    if hasattr(inputs, "dtype"):
        given = torch.as_tensor(inputs)
        return torch.zeros(given.shape, dtype=dtype if given.is_floating_point() else given.dtype)
    try:
        return torch.zeros(tuple(inputs), dtype=dtype)
    except (TypeError, RuntimeError):
        raise FedhmError(
            f"inputs must be the shape of one input, such as (3, 32, 32), or an array like one, not {inputs!r}"
        ) from None


@torch.no_grad()
def _outputs(model: nn.Module, batch: Inputs) -> int:
    try:
        return int(scores(model.eval(), batch).shape[1:].numel())
    except Exception as error:  # whatever a foreign model raises
        raise FedhmError(f"the model does not accept one input of shape {shape_of(batch)}: {error}") from error


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

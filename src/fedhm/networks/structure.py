"""The structure of any network: a copy of it, who holds its weights, and what it runs in training."""

import copy
from collections import Counter
from collections.abc import Sequence

from torch import nn

from fedhm.errors import FedhmError


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a network, to be changed; tensors that share a parameter's memory share it in the copy too."""
    memo: dict[int, object] = {}
    try:
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter:  # of which torch would copy the values alone
                memory = copy.deepcopy(parameter.data, memo)
                memo[id(parameter)] = nn.Parameter(memory, parameter.requires_grad)
        return copy.deepcopy(model, memo)
    except RuntimeError as error:  # torch cannot copy a weight that hooks have computed, such as old weight_norm's
        raise FedhmError(f"the model cannot be copied: {error}") from error


def weight_owners(model: nn.Module) -> Counter[int]:
    """Return, by a parameter's id, how many modules of the model hold it."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


def run_in_training(network: nn.Module) -> Sequence[tuple[nn.Module, float]]:
    """Return the networks that `network` runs in training (`drawn`), the widest first, and for how many of the batches.

    Ordered dropout draws one of several. They share the weights of the first.
    """
    drawn: Sequence[tuple[nn.Module, float]] | None = getattr(network, "drawn", None)
    return drawn or [(network, 1.0)]

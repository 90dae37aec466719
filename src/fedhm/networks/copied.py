"""A copy of a network, to be changed."""

import copy

from torch import nn

from fedhm.errors import FedhmError


def copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:  # torch cannot copy a weight that hooks have computed, such as old weight_norm's
        raise FedhmError(f"the model cannot be copied: {error}") from error

"""The structure of any network: a copy of it, who holds its weights, and what it runs in training."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedhm.errors import FedhmError
from fedhm.networks.copies import Memo, copied_tensor, deep_copy


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a network, to be changed; tensors that share a parameter's memory share it in the copy too.

    What everybody has (`networks/exchange.py`) is not copied.
    """
    memo: Memo = {}
    shared: frozenset[str] = vars(model).get("fedhm_everybodys", frozenset())
    try:
        for name, parameter in model.named_parameters():
            if name in shared:
                memo[id(parameter)] = parameter
            elif type(parameter) is nn.Parameter:  # of which torch would copy the values alone
                memo[id(parameter)] = nn.Parameter(copied_tensor(parameter.data, memo), parameter.requires_grad)
        copy: nn.Module = deep_copy(model, memo)
        return copy
    except RuntimeError as error:  # torch cannot copy a weight that hooks have computed, such as old weight_norm's
        raise FedhmError(f"the model cannot be copied: {error}") from error


def weight_owners(model: nn.Module) -> Counter[int]:
    """Return, by a parameter's id, how many modules of the model hold it."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


def normalises(network: nn.Module) -> bool:
    """Tell whether a network has normalisation layers of torch's."""
    return any(isinstance(m, _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm) for m in network.modules())


def run_in_training(network: nn.Module) -> Sequence[tuple[nn.Module, Fraction]]:
    """Return the networks that run in training, the widest first, and in which share of the batches each does.

    That is `network` itself, in all of them; ordered dropout has several, which share the weights of the first.
    """
    passes: Sequence[tuple[nn.Module, Fraction]] | None = getattr(network, "passes_in_training", None)
    return passes or [(network, Fraction(1))]


def heaviest_in_training(network: nn.Module) -> nn.Module:
    """Return what runs in the batch that takes the most memory, where batches are not all alike."""
    heaviest: nn.Module = getattr(network, "heaviest_in_training", network)
    return heaviest

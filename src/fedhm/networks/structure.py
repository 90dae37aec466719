"""The structure of any network: a copy of it, who holds its weights, and what it runs in training."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedhm.errors import FedhmError
from fedhm.networks.copies import Memo, copied_tensor, deep_copy
from fedhm.networks.exchange import base_of


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


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a frozen copy of a network that reads the very parameters of the first.

    A base may fill most of the memory. Nobody may write to it; what is trained or added to is parted first.
    """
    memo: Memo = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters() if type(p) is nn.Parameter
    }
    try:
        copy: nn.Module = deep_copy(model, memo)
    except RuntimeError as error:
        raise FedhmError(f"the model cannot be copied: {error}") from error
    return copy.requires_grad_(False)


def with_own_base(networks: Iterable[nn.Module]) -> None:
    """Give networks a base of their own in place of that of a user's model, one for all that shared it.

    Whoever merges an adapter into its base, or goes on to train the model, would change both.
    """
    own: dict[int, nn.Parameter] = {}
    keep: list[Tensor] = []  # as long as their ids stand for them
    for network in networks:
        shared = {id(parameter) for parameter in base_of(network).values()}
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in shared - own.keys():
                    keep.append(parameter)
                    own[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                if parameter is not None and id(parameter) in shared:
                    module._parameters[name] = own[id(parameter)]


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

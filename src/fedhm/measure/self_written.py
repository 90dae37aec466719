"""The tensors that a network writes itself while it runs in training: running averages, clipped weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedhm.machine.device import seeded
from fedhm.measure.cost import OperationWatch
from fedhm.networks.inputs import Inputs, forward_batch, repeat_batch
from fedhm.networks.structure import copy_network


def find_self_written(network: nn.Module, sample: Inputs) -> frozenset[str]:
    """Return the names of the tensors that a forward pass in training writes to, even if their values do not change.

    `sample` is a batch of one input. Errors of the network are raised: it may need other batches to train.
    """
    given = network.state_dict()
    network = copy_network(network).train()
    own = {name: t for name, t in network.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    memory = {name: tensor.untyped_storage() for name, tensor in own.items()}  # alive, so that no other has its address
    # the given network has the values before: another copy of a large network may fill the memory
    before = {name: given[name] if _apart(given.get(name), t) else t.detach().clone() for name, t in own.items()}
    with torch.no_grad(), seeded(0), _Writes() as watch:
        forward_batch(network, repeat_batch(sample, 2), "in training, ")  # a single sample has no variance
    after = network.state_dict(keep_vars=True)
    return frozenset(
        name
        for name, tensor in own.items()
        if after.get(name) is not tensor
        or tensor.untyped_storage()._cdata != memory[name]._cdata  # its memory was replaced, by tensor.data = …
        or memory[name]._cdata in watch.memory
        or not torch.equal(tensor, before[name])  # not every operation of torch declares that it writes
    )


def _apart(given: Any, copy: Tensor) -> bool:
    """Tell whether a copied tensor has other memory than the original."""
    return isinstance(given, Tensor) and given.untyped_storage()._cdata != copy.untyped_storage()._cdata


class _Writes(OperationWatch):
    """Collects the memory that operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                leaves = (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
                self.memory.update(leaf.untyped_storage()._cdata for leaf in leaves)
        return func(*args, **kwargs)

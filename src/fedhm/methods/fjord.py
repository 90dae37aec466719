"""FjORD: ordered dropout. A client trains its tier's width, but every batch runs at a width drawn from those up to it.

The first channels thus learn to do without the later ones, and every tier's network is inside the larger ones.
Numbers are averaged over those who hold them, as in HeteroFL. (FjORD's option to distil from the client's widest to
its narrower networks is not in here.)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedhm.messages import Participant, Task, Tensors, Update
from fedhm.method_config import FjORDConfig
from fedhm.methods.method import Setup, State
from fedhm.methods.sliced import Slices

PREFIX = "network."


class OrderedDropout(nn.Module):
    """`network` in evaluation; in training, for each batch, one of `narrower` with the leading weights of `network`."""

    def __init__(self, network: nn.Module, narrower: Sequence[nn.Module]) -> None:
        super().__init__()
        self.network = network
        self._narrower = list(narrower)  # a plain list: they have no weights of their own

    def forward(self, x: Tensor) -> Tensor:
        drawn = int(torch.randint(len(self._narrower) + 1, ())) if self.training else 0
        if drawn == 0:
            y: Tensor = self.network(x)
            return y
        chosen = self._narrower[drawn - 1].train()
        own = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        shapes = {name: t.shape for name, t in chosen.state_dict().items()}
        leading = {name: own[name][tuple(slice(size) for size in shape)] for name, shape in shapes.items()}
        return torch.func.functional_call(chosen, leading, (x,))


class FjORD:
    def __init__(self, model: nn.Module, config: FjORDConfig, setup: Setup) -> None:
        self.config = config
        self.slices = Slices(model, config.tiers, setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> State:
        return State(weights)

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for task in self.slices.tasks(state.weights, participants, round_number):
            yield replace(task, tensors=_inside(task.tensors))

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        outside = (replace(u, tensors={n.removeprefix(PREFIX): t for n, t in u.tensors.items()}) for u in updates)
        return State(self.slices.merged(state.weights, outside, self.config.weighting))

    def network(self, name: str) -> nn.Module:
        smaller = self.tiers[self.tiers.index(name) + 1 :]
        return OrderedDropout(self.slices.network(name), [self.slices.network(tier) for tier in smaller])

    def weights(self, state: State, tier: str) -> Tensors:
        return _inside(self.slices.take(state.weights, tier))


def _inside(tensors: Tensors) -> Tensors:
    """Named as `OrderedDropout` names them."""
    return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}

"""What methods have in common in which all clients train the same network."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import nn

from fedhm.errors import FedhmError
from fedhm.methods.method import Method, ModelState
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task


class Homogeneous(Method[ModelState], ABC):
    """A method with one tier; its state's weights are those of that tier's network, as they travel."""

    tiers: tuple[str, ...]
    levels: tuple[str, ...]

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.tiers = self.levels = (tier,)

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, self.tier, state.weights)

    def network(self, name: str) -> nn.Module:
        if name != self.tier:
            raise FedhmError(f"{type(self).__name__} has one network, '{self.tier}', not '{name}'")
        return self.build()

    def weights(self, state: ModelState, tier: str) -> Tensors:
        return state.weights

    @abstractmethod
    def build(self) -> nn.Module:
        """Return a new network, whose weights are to be loaded."""

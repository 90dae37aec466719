"""The protocol of a method: how the server turns its state into tasks, and updates into its next state.

A method holds no mutable state of its own. To write one, implement `Method` in a file of its own and name it in the
table in `methods/__init__.py`; the loop, the client and the engines know nothing of it. A toy that sends the
model to every participant and keeps the last one that comes back:

    class LastOne:
        tiers = ("full",)
        levels = ("full",)
        def __init__(self, model, config, setup): self.model = model
        def start(self, weights): return State(weights)
        def tasks(self, state, participants, round_number):
            for p in participants:
                yield Task("train", round_number, p.client, p.tier, "full", state.weights)
        def merge(self, state, updates): return State([u.tensors for u in updates][-1])
        def network(self, name): return copy.deepcopy(self.model)
        def weights(self, state, tier): return state.weights
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from fedhm.data.batches import Feed
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update


@dataclass(frozen=True)
class State:
    """All that the server carries from round to round: tensors and numbers, so that it can be written to disk."""

    weights: Tensors  # the global model
    memory: Tensors = field(default_factory=dict)  # what else the method keeps
    diagnostics: dict[str, float] = field(default_factory=dict)  # of the last merge, for the record


@dataclass(frozen=True)
class Setup:
    """What a method may know of its run beside its own settings."""

    classifier: str | None = None  # the layer that gives the logits, where there is one
    sample: Tensor | None = None  # a batch of one input, for methods that must see the model run
    seed: int = 0
    public: Feed | None = None  # samples that everybody has, numbered in place of labels
    fixed: bool = True  # every client stays at its tier


class Method(Protocol):
    @property
    def tiers(self) -> Sequence[str]:
        """The tiers' names, largest first. A client's tier is one of them."""
        ...

    @property
    def levels(self) -> Sequence[str]:
        """The tier of each capability level, strongest first: one with two shares of the clients comes twice."""
        ...

    def start(self, weights: Tensors) -> State:
        """The state before the first round, from the initial weights of the full model."""
        ...

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        """What the participants are to do. A client may get several tasks."""
        ...

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """The next state. Folds one update at a time, so that memory does not grow with their number."""
        ...

    def network(self, name: str) -> nn.Module:
        """A new network of a tier, or of any name that tasks carry; its weights are to be loaded."""
        ...

    def weights(self, state: State, tier: str) -> Tensors:
        """The weights of a tier's network, for evaluation and to be handed out."""
        ...

"""The protocol of a method: how the server turns its state into tasks, and updates into its next state.

A method holds no mutable state of its own. To write one, subclass `MethodConfig` for its settings and `Method` for its
functions, in one file. The loop, the clients, the engines and the reports need no change. `examples/own_method.py` is a
complete method. The shortest method keeps the last model that comes back:

    class LastOne(MethodConfig):
        name: Literal["last-one"] = "last-one"
        def build(self, model, setup): return Running(model)

    class Running(Method[ModelState]):
        tiers = levels = ("full",)
        def __init__(self, model): self.model = model
        def start(self, weights): return ModelState(weights)
        def tasks(self, state, participants, round_number):
            for p in participants:
                yield Task("train", round_number, p.client, p.tier, self.spec(p.tier), state.weights)
        def merge(self, state, updates, round_number): return ModelState([u.tensors for u in updates][-1])
        def network(self, spec): return copy.deepcopy(self.model)
        def weights(self, state, tier): return state.weights
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from torch import nn

from fedhm.config.objective import Objective
from fedhm.config.registry import make
from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Feed
from fedhm.errors import FedhmError
from fedhm.methods.means import MakeMean, WeightedMean
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import Inputs
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, TaskOptions, Update


@dataclass(frozen=True)
class State:
    """Everything that the server carries from round to round. A method's own state is a frozen subclass of this one.

    Its fields are tensors and plain values, or dicts, tuples and dataclasses of these. So it can be written to disk and
    read back by its types (`server/state.py`).
    """

    diagnostics: dict[str, float] = field(default_factory=dict, kw_only=True)  # of the last merge, for the record
    averaged: ClassVar[tuple[str, ...]] = ("weights",)  # the fields that the server's optimizer steps on


@dataclass(frozen=True)
class ModelState(State):
    """The state of a method that keeps one set of weights."""

    weights: Tensors


@dataclass(frozen=True)
class Setup:
    """The facts of a run that a method may use beside its own settings."""

    classifier: str | None = None  # the layer that gives the outputs, if there is one
    sample: Inputs | None = None  # a batch of one input, for methods that must see the model run
    seed: int = 0
    public: Feed | None = None  # samples that all clients have, with their numbers in place of labels, on the device
    fixed: bool = True  # every client stays at its tier
    objective: Objective = field(default_factory=partial(make, "objectives", "classification"))
    # the shares of a client's batches that train its own network, and a smaller tier inside it; None: no nesting
    nested: tuple[float, float] | None = None
    nested_tier: Literal["smallest", "random"] = "smallest"  # which of the smaller tiers
    make_mean: MakeMean = WeightedMean  # or a coordinate-wise rule, for methods with `by_coordinate`
    train: TrainConfig | None = None  # the training settings, for tiers that are budgets of memory
    optimizer_follows: bool = False  # a filter changes each merged state: `refresh_derived` is called afterwards
    classifiers: tuple[str, ...] = ()  # all layers that give outputs, if there are several

    @property
    def output_layers(self) -> tuple[str, ...]:
        """Return all layers that give outputs: their rows are averaged over the clients that hold a label."""
        return self.classifiers or (() if self.classifier is None else (self.classifier,))


S = TypeVar("S", bound=State)


class Method(Protocol[S]):
    """A method as it runs. `AnyMethod` has a state of any type."""

    tiers: tuple[str, ...]  # names, largest first: a client's tier is one of them
    # The tier of each capability level, strongest first; a tier with two shares comes twice. A level that is none of
    # the tiers has no network: its clients are sampled like the others, and then left out.
    levels: tuple[str, ...]
    one_model: bool = False  # its networks are versions of one model: recovered, they have tensors of the same shapes
    state_type: type[Any] = ModelState  # the type that `start` and `merge` return
    recovers: bool = False  # for factorized layers, it averages the products of the factors and not the factors

    def start(self, weights: Tensors) -> S:
        """Return the state before the first round, from the initial weights of the full model."""
        ...

    def tasks(self, state: S, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        """Yield the participants' tasks. A client may get several tasks."""
        ...

    def merge(self, state: S, updates: Iterable[Update], round_number: int) -> S:
        """Return the next state. Take one update at a time, so that memory does not grow with their number.

        There may be none, if no participant had time or a network, or if a private round drew nobody.
        """
        ...

    def refresh_derived(self, state: S, before: S) -> S:
        """Recompute the fields that follow from the averaged ones, after a filter has changed these."""
        return state

    def spec(self, tier: str, state: S | None = None) -> NetworkSpec:
        """Return which network a tier has in this state; without a state, at the start."""
        return NetworkSpec(tier)

    def network(self, spec: NetworkSpec) -> nn.Module:
        """Return a new network, of a tier or of any spec that tasks carry; its weights are loaded afterwards."""
        ...

    def weights(self, state: S, tier: str) -> Tensors:
        """Return the weights of a tier's network, for evaluation and deployment."""
        ...

    def full_spec(self) -> NetworkSpec | None:
        """Return which network is the whole model, that the costs of tiers are shares of; None if none is."""
        return self.spec("full") if "full" in self.tiers else None

    def remarks(self) -> Sequence[str]:
        """Return what users should know of the tiers before a run: a warning for each sentence."""
        return ()

    def planned_ranks(self, state: S) -> dict[str, dict[str, int]]:
        """Return by tier the ranks of its layers, if the state decides on them."""
        return {}

    def training_options(self, state: S, tier: str) -> TaskOptions:
        """Return how a tier's clients save memory, if that differs from the settings."""
        return TaskOptions()


AnyMethod = Method[Any]


class Homogeneous(Method[ModelState], ABC):
    """A method in which all clients train the same network. Its state is the weights of that network as they travel."""

    tiers: tuple[str, ...]
    levels: tuple[str, ...]

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.tiers = self.levels = (tier,)

    def tasks(self, state: ModelState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, self.spec(self.tier), state.weights)

    def network(self, spec: NetworkSpec) -> nn.Module:
        if spec.tier != self.tier:
            raise FedhmError(f"{type(self).__name__} has one network, '{self.tier}', not '{spec}'")
        return self.build()

    def weights(self, state: ModelState, tier: str) -> Tensors:
        return state.weights

    @abstractmethod
    def build(self) -> nn.Module:
        """Return a new network; its weights are loaded afterwards."""

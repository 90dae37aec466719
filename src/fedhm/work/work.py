"""The protocol of a kind of client work: how it runs, what its answer looks like, how that is bounded, what it costs.

A kind is one file of this package that ends in `ENTRY_POINT = …`, or an object that another package names in the
entry-point group `fedhm.work`. Tasks carry its name, and nobody else asks for it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from fedhm.config.plugins import find
from fedhm.config.sections.objective import Objective
from fedhm.config.sections.training import TrainConfig
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import Inputs
from fedhm.networks.reuse import Ready
from fedhm.work.bounds import Expected, change
from fedhm.work.client import Client
from fedhm.work.messages import Task, Update


@dataclass(frozen=True)
class Answer:
    """What came of a task, before it is an update."""

    tensors: Tensors
    loss: float = 0.0  # mean over the last epoch
    labels: tuple[int, ...] | None = None  # that the client holds, where its loss was masked to them
    kept: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """One sample, and what else a kind of work needs to know of a run to tell what its answers look like."""

    inputs: Inputs  # a batch of one
    targets: Tensor  # likewise
    objective: Objective
    public: int = 0  # how many public samples there are


class Work(Protocol):
    trains: bool  # it is counted as training, tier by tier; all other work is counted apart
    returns_network: bool  # its answer has the very tensors that the network was loaded with
    tests: bool  # it runs on the client's test samples in place of those that it trains on, and is counted apart
    past: str  # what a client did, in a sentence: it trained
    short: str  # for a progress bar, which must fit 80 columns

    def loaded(self, task: Task) -> Tensors:
        """Return the tensors that the task's network is loaded with."""
        ...

    def run(self, client: Client, task: Task, ready: Ready) -> Answer:
        """Do the task, on the client."""
        ...

    def blank(self, network: nn.Module, example: Example) -> Tensors:
        """Return an answer's names, shapes and types, where it does not return the network."""
        ...

    def objection(self, update: Update, task: Task, expected: Expected) -> str | None:
        """Return why the values of an answer, which has the right tensors, must not be used; None if they may."""
        ...

    def passes(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        """Return how many samples go forward through the network, as the paper counts computation.

        `samples` are the client's, or its test samples if the work runs on these.
        """
        ...


class TrainingWork(ABC):
    """What the kinds have in common that train the network on the client's samples and send it back."""

    trains = returns_network = True
    tests = False
    past, short = "trained", "train"

    @abstractmethod
    def run(self, client: Client, task: Task, ready: Ready) -> Answer: ...

    def loaded(self, task: Task) -> Tensors:
        return task.tensors

    def blank(self, network: nn.Module, example: Example) -> Tensors:
        raise AssertionError("an answer has the tensors that the network was loaded with")

    def objection(self, update: Update, task: Task, expected: Expected) -> str | None:
        return change(update.tensors, self.loaded(task), expected)

    def passes(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        return samples * train.epochs  # of a network whose costs are those of all that runs for a batch


def work_of(kind: str) -> Work:
    """Return the work of a kind by its name."""
    found: Work = find("work", kind)
    return found

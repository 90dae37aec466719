"""The protocol of a kind of client work: how it runs, the form of its answer, the bounds on its numbers, its cost.

A kind is one file of this package that ends in `ENTRY_POINT = …`, or an object that another package names in the
entry-point group `fedhm.work`. Tasks carry its name. No other registration is needed.

The server computes with an answer only after `validate`: a single 1e38 destroys a mean.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from fedhm.config.objective import Objective
from fedhm.config.registry import find
from fedhm.config.schema import TrainConfig
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import Inputs
from fedhm.networks.reuse import PreparedNetwork
from fedhm.networks.saving import count_batches
from fedhm.work.client import Client
from fedhm.work.messages import Task, TrainingMeasures, Update

LARGEST_LOGIT = 1e6
LARGEST_LOSS = 1e30  # sums of such losses are finite
LARGEST_MEAN = 1e10  # of a BatchNorm layer's inputs, perhaps raw; its square is the largest variance


@dataclass(frozen=True)
class Expected:
    """What the server knows about an answer in advance."""

    tensors: Tensors  # with the answer's names, shapes and types; for statistics, `values` are those of one sample
    samples: int  # of the client, or its test samples if the work runs on these; 0: it has not said yet
    classes: int
    labelled: bool = False  # the answer says which labels its client holds
    running: Set[str] = frozenset()  # names of running averages, and of other buffers that follow the data
    fixed: Set[str] = frozenset()  # names of tensors that training leaves alone: other buffers, frozen parameters
    halved: bool = False  # matrices travelled in half precision
    largest_output: float = LARGEST_LOGIT  # of a network
    max_change: float = 0.0  # largest norm of the change, relative to the norm of the tensors sent; 0: no limit
    objective: Objective | None = None


def validate_change(tensors: Tensors, sent: Tensors, expected: Expected) -> str | None:
    """Return why weights must not be used: not finite, or too far from the weights that were sent; None if they may."""
    norm = 0.0
    for name, tensor in tensors.items():
        if name in expected.running:
            if reason := validate_bounds(name, tensor, *moment_bounds(name.endswith("running_var"))):
                return reason
        elif name in expected.fixed:
            if not _same(tensor, sent[name], expected.halved and tensor.ndim > 1):
                return f"'{name}' is not trained, but did not come back as it was sent"
        else:
            norm = math.hypot(norm, found := _norm(tensor))
            if math.isnan(found):
                return f"'{name}' holds NaN or infinite values"
    limit = expected.max_change
    # ‖tensors − sent‖ ≤ ‖tensors‖ + ‖sent‖. Norms take a quarter of the time of a difference, and mostly they suffice.
    if not limit or norm + 1 <= ROUNDING * limit:
        return None
    untrained = expected.running | expected.fixed
    base = 0.0
    # If norm + base ≤ limit · base holds for some of the tensors, it holds for all. So large tensors are rarely read.
    for tensor in sorted((t for name, t in sent.items() if name not in untrained), key=Tensor.numel):
        base = math.hypot(base, _norm(tensor))
        if norm + base <= ROUNDING * limit * base:
            return None
    change = math.hypot(*(_distance(tensor, sent[name]) for name, tensor in tensors.items() if name not in untrained))
    if not change <= limit * max(base, 1.0):  # NaN, if what was sent is not finite
        return f"its change has norm {change:.1e}, over {limit:g} × that of what was sent"
    return None


def _same(tensor: Tensor, sent: Tensor, halved: bool) -> bool:
    """Tell whether two tensors have the same bits, in the precision in which they travelled."""
    tensor, sent = (tensor.half(), sent.half()) if halved and tensor.is_floating_point() else (tensor, sent)
    return torch.equal(tensor.flatten().view(torch.uint8), sent.flatten().view(torch.uint8))


ROUNDING = 0.9  # sums of float32 are closer than that to the exact ones


def _norm(tensor: Tensor) -> float:
    """Return ‖tensor‖; NaN if it is not finite. It is computed in float64 if the type overflows."""
    tensor = _as_real(tensor)
    norm: float = torch.linalg.vector_norm(tensor).item() if tensor.element_size() > 2 else math.inf
    if not math.isfinite(norm):
        norm = torch.linalg.vector_norm(tensor.double()).item() if bool(tensor.isfinite().all()) else math.nan
    return norm


def _distance(tensor: Tensor, sent: Tensor) -> float:
    """Return ‖tensor − sent‖ of finite tensors, in float64 if the type overflows."""
    tensor, sent = _as_real(tensor), _as_real(sent)
    if tensor.element_size() > 2 and math.isfinite(distance := torch.dist(tensor, sent).item()):
        return distance
    return torch.dist(tensor.double(), sent.double()).item()


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def moment_bounds(variance: bool) -> tuple[float, float]:
    """Return the lowest and highest allowed value of a mean or variance of a BatchNorm layer's inputs."""
    return (0.0, LARGEST_MEAN**2) if variance else (-LARGEST_MEAN, LARGEST_MEAN)


def validate_bounds(name: str, tensor: Tensor, lowest: float, highest: float) -> str | None:
    """Return which value of a tensor is not finite or out of bounds; None if all are within."""
    if not tensor.numel():
        return None
    smallest, largest = (value.item() for value in _as_real(tensor).aminmax())
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return f"'{name}' holds NaN or infinite values"
    if lowest <= smallest and largest <= highest:
        return None
    return f"'{name}' has the value {smallest if smallest < lowest else largest:.3g}, not in {lowest:g}…{highest:g}"


@dataclass(frozen=True)
class WorkResult:
    """The result of a task. The client makes an update of it."""

    tensors: Tensors
    loss: float = 0.0  # mean over the last epoch, or over all steps if they are fewer
    labels: tuple[int, ...] | None = None  # the labels that the client holds, if its loss was masked to them
    kept: Tensors = field(default_factory=dict)
    measured: TrainingMeasures | None = None  # of training, if the task asked for it


@dataclass(frozen=True)
class Example:
    """One sample and the facts of a run from which the form of an answer follows."""

    inputs: Inputs  # a batch of one
    targets: Tensor  # likewise
    objective: Objective
    public: int = 0  # how many public samples there are


class Work(Protocol):
    """A kind of client work."""

    trains: bool  # its traffic counts as training, tier by tier
    returns_network: bool  # its answer has the tensors that the network was loaded with
    tests: bool  # it runs on the client's test samples, and its traffic counts as evaluation
    past: str  # the verb in a sentence: "trained"
    short: str  # for a progress bar, which must fit 80 columns

    def loaded(self, task: Task) -> Tensors:
        """Return the tensors that the task's network is loaded with."""
        ...

    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        """Do the task, on the client."""
        ...

    def expected(self, network: nn.Module, example: Example) -> Tensors:
        """Return tensors with the names, shapes and types of an answer, if it does not return the network."""
        ...

    def validate(self, update: Update, task: Task, expected: Expected) -> str | None:
        """Return why the values of an answer must not be used; None if they may. Names and shapes are right already."""
        ...

    def samples_seen(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        """Return how many samples go forward through the network, as the paper counts computation.

        `samples` are the client's, or its test samples if the work runs on these.
        """
        ...


class TrainingWork(ABC):
    """The common part of all kinds that train the network on the client's samples and send it back."""

    trains = returns_network = True
    tests = False
    past, short = "trained", "train"

    @abstractmethod
    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult: ...

    def loaded(self, task: Task) -> Tensors:
        return task.tensors

    def expected(self, network: nn.Module, example: Example) -> Tensors:
        raise AssertionError("an answer has the tensors that the network was loaded with")

    def validate(self, update: Update, task: Task, expected: Expected) -> str | None:
        return validate_change(update.tensors, self.loaded(task), expected)

    def samples_seen(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        return samples_trained_on(train, samples)  # the network's cost covers everything that runs for a batch


def steps_in_round(train: TrainConfig, samples: int) -> int:
    """Return how many local steps a client with so many samples makes in a round."""
    return train.iterations or train.epochs * count_batches(samples, train.batch)


def samples_trained_on(train: TrainConfig, samples: int) -> int:
    """Return how many samples the local steps of a round take, each counted as often as it is trained on.

    With `train.iterations`, steps beyond whole passes count as whole batches. Sequences are batched in random order, so
    a smaller batch may be among these steps, and the count is then a little too large.
    """
    if not train.iterations:
        return samples * train.epochs
    passes, rest = divmod(train.iterations, count_batches(samples, train.batch))
    return passes * samples + rest * train.batch


def work_of(kind: str) -> Work:
    """Return the work of a kind by its name."""
    found: Work = find("work", kind)
    return found

"""What goes between server and clients: tasks down, updates up. Tensors and plain values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedhm.networks.exchange import Tensors


@dataclass(frozen=True)
class Participant:
    """A client that takes part in a round, and the tier that it can afford."""

    client: int
    tier: str


@dataclass(frozen=True)
class Task:
    """Server → client: do this with that network."""

    kind: str  # of work: a module of `fedhm.work`, or an entry point of that group
    round: int  # counted from 1
    client: int
    tier: str  # what the client can afford
    network: str  # which of the method's networks the tensors belong to; often named as the tier
    tensors: Tensors
    kept: Tensors = field(default_factory=dict)  # what the client keeps from task to task: it need not travel
    options: Mapping[str, float] = field(default_factory=dict)  # of this kind of task


@dataclass(frozen=True)
class Update:
    """Client → server: what came of a task."""

    kind: str
    round: int
    client: int
    tier: str
    network: str
    tensors: Tensors
    samples: int
    labels: tuple[int, ...] | None  # the labels that the client holds, where its loss was masked to them
    loss: float  # mean over the last epoch
    position: int = 0  # its task's place in the round's list
    kept: Tensors = field(default_factory=dict)  # see Task
    down: int | None = None  # bytes that really travelled for its task and for itself, where the engine knows
    up: int | None = None


@dataclass(frozen=True)
class Failure:
    """In place of an update: the client could not do its task."""

    client: int
    reason: str
    position: int = 0
    cause: Exception | None = None  # where it happened in this process: for whoever debugs a network of their own
    down: int | None = None  # as in an update: what failed may have travelled too
    up: int | None = None


Reply = Update | Failure

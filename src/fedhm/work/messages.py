"""The messages between server and clients: tasks down, updates up. They hold tensors and plain values only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec


@dataclass(frozen=True)
class Participant:
    """A client that takes part in a round, and the tier that it can afford."""

    client: int
    tier: str


@dataclass(frozen=True)
class TaskOptions:
    """The options of a task, beyond the run's settings. Each kind of work reads its own fields."""

    micro_batch: int | None = None  # train: of a tier that is a budget of memory; None: as the settings say
    checkpointing: bool | None = None  # train: likewise
    measure: bool = False  # train, nested: measure every step
    batch: int = 0  # evaluate: how many samples run together; gradient: how many there are
    test_batch_statistics: bool = False  # evaluate: BatchNorm layers normalise by the statistics of each batch
    digest_epochs: int = 0  # distil: passes over the public samples, towards the consensus
    digest_lr: float = 0.0
    kept_rank: int = 0  # prune: the rank of an adapter after its last directions are pruned
    penalty: float = 0.0  # prune: λ, on the norms of these directions
    extra: Mapping[str, Any] = field(default_factory=dict)  # plain values, for kinds of work of other packages


@dataclass(frozen=True)
class Task:
    """Server → client: do this with that network."""

    kind: str  # of work: a module of `fedhm.work`, or an entry point of that group
    round: int  # counted from 1
    client: int
    tier: str  # the tier that the client can afford
    network: NetworkSpec  # which of the method's networks the tensors belong to
    tensors: Tensors
    kept: Tensors = field(default_factory=dict)  # the client keeps these between tasks: they need not travel
    options: TaskOptions = TaskOptions()


@dataclass(frozen=True)
class TrainingMeasures:
    """What a client measured over the local steps of a round (`docs/theory.md`)."""

    gradient_squared: float  # the mean of ‖∇G‖² over the steps, of all trained parameters together
    factor_norm: float  # the largest ‖U‖_F or ‖V‖_F of a factorized layer, before, between and after the steps


@dataclass(frozen=True)
class Update:
    """Client → server: the result of a task."""

    kind: str
    round: int
    client: int
    tier: str
    network: NetworkSpec
    tensors: Tensors
    samples: int
    labels: tuple[int, ...] | None  # the labels that the client holds, if its loss was masked to them
    loss: float  # mean over the last epoch, or over all steps if they are fewer
    position: int = 0  # of its task in the round's list
    kept: Tensors = field(default_factory=dict)  # see Task
    down: int | None = None  # bytes that really travelled for its task and for the update, if the engine knows
    up: int | None = None
    measured: TrainingMeasures | None = None  # of training, if the task asked for it
    weight: float = 1.0  # how much the client counts in the mean (federation.weights); the server sets it


@dataclass(frozen=True)
class Failure:
    """In place of an update: the client could not do its task."""

    client: int
    reason: str
    position: int = 0
    cause: Exception | None = None  # the exception, if it happened in this process
    down: int | None = None  # as in an update: the reply of a failed task may have travelled too
    up: int | None = None


Reply = Update | Failure

# All engines share one codec: the fields of a message without its tensors, as plain values for JSON. An engine carries
# the tensors in its own way, and adds the position and the bytes that travelled, which only the engine knows.
_NOT_VALUES = {"tensors", "kept", "position", "down", "up", "weight"}
UPDATE_VALUES = {each.name for each in fields(Update)} - _NOT_VALUES


def task_values(task: Task) -> dict[str, Any]:
    """Return all of a task but its tensors. Options at their defaults are left out: most tasks have no others."""
    values, given = _values(task), asdict(task.options)
    options = {name: value for name, value in given.items() if value != getattr(TaskOptions(), name)}
    del values["options"]
    return values | {"options": options} if options else values


def task_from(values: Mapping[str, Any], tensors: Tensors, kept: Tensors) -> Task:
    """Return the task of these values and tensors."""
    parts = {"network": NetworkSpec.from_values(values["network"]), "options": TaskOptions(**values.get("options", {}))}
    return Task(**{**values, **parts, "tensors": tensors, "kept": kept})


def update_values(update: Update) -> dict[str, Any]:
    """Return all of an update but its tensors."""
    return _values(update) | {"measured": asdict(update.measured) if update.measured else None}


def update_from(values: Mapping[str, Any], tensors: Tensors, kept: Tensors) -> Update:
    """Return the update of these values and tensors. A value of a wrong type is for admission to refuse."""
    network, labels, measured = values["network"], values["labels"], values["measured"]
    known = isinstance(measured, dict) and measured.keys() == {each.name for each in fields(TrainingMeasures)}
    return Update(
        **{
            **values,
            "network": NetworkSpec.from_values(network) if isinstance(network, dict) else network,
            "labels": tuple(labels) if isinstance(labels, list) else labels,
            "measured": TrainingMeasures(**measured) if known else measured,
            "tensors": tensors,
            "kept": kept,
        }
    )


def _values(message: Task | Update) -> dict[str, Any]:
    found = {each.name: getattr(message, each.name) for each in fields(message) if each.name not in _NOT_VALUES}
    return found | {"network": message.network.to_values()}

"""The largest version of a model that a device can afford: ranks by layer, and how to train it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from fedhm.config.budget import KINDS, Kind, read_size, size_text
from fedhm.errors import FedhmError
from fedhm.lowrank.decompositions.unroll import Form
from fedhm.lowrank.plan import RankPlan
from fedhm.measure.cost import Cost
from fedhm.measure.versions import Mode, Training, Versions
from fedhm.networks.batchnorm import running_names

FEWEST = 8  # samples in a micro-batch before ranks are lowered: fewer take much longer
FEWEST_NORMALISED = 16  # likewise where BatchNorm takes its statistics from them
PLACES = 128  # of versions at which memory is looked at


@dataclass(frozen=True)
class Expected:
    """What training the chosen version takes."""

    memory: int  # bytes, of a step
    macs: int  # of one sample's forward pass
    bytes: int  # of one transfer, in one direction
    parameters: int
    seconds: float | None = None  # of a step, where it was measured


@dataclass(frozen=True)
class Fit:
    """A version of a model that meets its budgets."""

    plan: RankPlan  # ranks layer by layer
    micro_batch: int  # train.micro_batch; 0: none
    checkpointing: bool  # train.checkpointing
    expected: Expected
    kept: Mapping[str, float] = field(default_factory=dict)  # by layer, the share of its energy
    number: int = 0  # of the version, counted from the smallest

    @property
    def mode(self) -> Mode:
        return Mode(self.micro_batch, self.checkpointing)


def fit(
    model: nn.Module,
    sample_shape: tuple[int, ...],
    batch: int = 64,
    memory: float | str | None = None,
    macs: float | str | None = None,
    bytes: float | str | None = None,  # noqa: A002
    parameters: float | str | None = None,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    *,
    keep: int = 1,
    form: Form = "spatial",
    classifier: str | None = "auto",
    dtype: torch.dtype | None = None,
) -> Fit:
    """Find the largest version of `model` that meets all budgets, and the cheapest way to train it.

    memory              of a training step on `batch` samples: "128MB", "2MiB", or bytes
    macs                of one sample's forward pass: "50M", or a number
    bytes               of one transfer of the network, in one direction
    parameters          trainable ones
    keep, form, classifier  as in `plan_ranks`
    dtype               of the inputs, if not the weights': torch.int64 for a model that reads tokens

    Ranks are chosen layer by layer from the spectrum of the model's weights (`lowrank/allocate.py`). Memory is saved by
    checkpointing, which changes nothing, before micro-batches, and by these before ranks are lowered.
    """
    given: dict[Kind, float | str | None] = {"memory": memory, "macs": macs, "bytes": bytes, "parameters": parameters}
    try:
        limits = {kind: read_size(size, kind) for kind, size in given.items() if size is not None}
    except ValueError as error:
        raise FedhmError(str(error)) from None
    if not limits:
        raise FedhmError(f"fit needs at least one budget: {', '.join(KINDS)}")
    if batch < 1:
        raise FedhmError(f"a batch has at least one sample, not {batch}")
    by: Literal["parameters", "macs"] = "macs" if set(limits) == {"macs"} else "parameters"
    training = Training(sample_shape, batch, optimizer, dtype)
    return fit_versions(Versions(model, training, keep, classifier, form, by=by), limits)


def fit_versions(versions: Versions, limits: Mapping[Kind, int], modes: list[Mode] | None = None) -> Fit:
    """Find the largest of a model's versions that meets its limits, trained in one of the modes."""
    static: dict[Kind, int] = {kind: amount for kind, amount in limits.items() if kind != "memory"}
    for kind, amount in static.items():
        _check_smallest(versions, kind, amount)
    number = _largest(lambda n: meets(versions.cost(versions.plan(n)), static), versions.last)
    mode = Mode()
    if "memory" in limits:
        number, mode = _in_memory(versions, number, limits["memory"], modes or versions.modes())
    return fitted(versions, versions.plan(number), mode, number)


def fitted(versions: Versions, plan: RankPlan, mode: Mode, number: int = 0) -> Fit:
    """Return a version with what it is expected to take."""
    cost = versions.cost(plan)
    expected = Expected(versions.memory(plan, mode), cost.macs, cost.bytes, cost.parameters)
    return Fit(plan, mode.micro_batch, mode.checkpointing, expected, versions.kept(plan), number)


def meets(cost: Cost, limits: Mapping[Kind, int]) -> bool:
    return all(getattr(cost, kind) <= amount for kind, amount in limits.items())


def _largest(fits: Callable[[int], bool], last: int) -> int:
    """Return the number of the largest version that fits; 0 always does. A larger budget never has a smaller one."""
    if fits(last):
        return last
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _in_memory(versions: Versions, number: int, limit: int, modes: list[Mode]) -> tuple[int, Mode]:
    """Return the largest version up to `number`, and the cheapest mode in which it fits."""

    def fits(n: int, mode: Mode) -> bool:
        return versions.memory(versions.plan(n), mode) <= limit

    few = FEWEST_NORMALISED if running_names(versions.model) else FEWEST
    usual = [mode for mode in modes if not mode.micro_batch or mode.micro_batch >= few] or modes[:1]
    last = next((mode for mode in (usual[-1], *modes[len(usual) :]) if fits(0, mode)), None)
    if last is None:
        _refuse_memory(versions, limit, modes)
    assert last is not None
    usual = usual if last in usual else [last]
    if whole := next((mode for mode in usual if fits(number, mode)), None):
        return number, whole
    grid = -(-versions.last // PLACES)  # memory takes long to find
    number = grid * _largest(lambda n: fits(n * grid, last), number // grid)
    return number, next(mode for mode in usual if fits(number, mode))


def _check_smallest(versions: Versions, kind: Kind, limit: int) -> None:
    least = getattr(versions.cost(versions.plan(0)), kind)
    if least <= limit:
        return
    raise FedhmError(
        f"{kind} = {size_text(limit, kind)} is too little for this model: its smallest version, of rank 1 in "
        f"{len(versions.layers)} layers, has {size_text(least, kind)}, most of it in the layers that stay dense (the "
        f"classifier, the first {versions.keep}): give at least so much, or a smaller model"
    )


def _refuse_memory(versions: Versions, limit: int, modes: list[Mode]) -> None:
    plan = versions.plan(0)
    needed, mode = min(((versions.memory(plan, mode), mode) for mode in modes), key=lambda pair: pair[0])
    raise FedhmError(
        f"memory = {size_text(limit, 'memory')} is too little to train any version of this model: the closest, of rank "
        f"1 in {len(versions.layers)} layers with {mode}, takes {math.ceil(needed / 1e4) / 100:,.2f} MB for a batch of "
        f"{versions.training.batch}: give at least so much, or a smaller model"
    )

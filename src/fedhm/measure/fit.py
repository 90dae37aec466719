"""The largest version of a model that a device can afford: ranks by layer, and how to train it."""

import math
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from fedhm.config.schema import OptimizerName
from fedhm.config.units import KINDS, Kind, amount_text, parse_amount
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import (
    LayerSpectrum,
    RankPlan,
    layer_spectra,
    levels_after,
    levels_of_plan,
    plan_of_levels,
    plan_ranks,
    rank_order,
    with_rank_costs,
)
from fedhm.lowrank.svd import Form
from fedhm.measure.cost import Cost, SampleSpec, measure, training_memory, zero_batch
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.saving import can_checkpoint
from fedhm.networks.structure import copy_network

SMALLEST = 1e-9  # at this ratio every layer has rank 1
Amount = TypeVar("Amount")


@dataclass(frozen=True)
class TrainingMode:
    """How a version is trained: two ways to save memory at the cost of time."""

    micro_batch: int = 0  # 0: the whole batch at once
    checkpointing: bool = False

    def __str__(self) -> str:
        parts = ["checkpointing"] if self.checkpointing else []
        parts += [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        return " and ".join(parts) or "nothing to save memory"


@dataclass(frozen=True)
class TrainingSetup:
    """The inputs and the optimizer with which versions are trained."""

    shape: SampleSpec  # of one input; a batch of one if it is several tensors
    batch: int
    optimizer: str = "sgd"
    dtype: torch.dtype | None = None  # of the inputs; None: the type of the weights


class ModelVersions:
    """The versions of `model` between rank 1 in every layer and the full network, and the cost of each.

    A version's number is the number of steps in `rank_order` from the smallest version. Costs are found on torch's meta
    device, where tensors have shapes but no numbers, so that nothing is computed.

    weights  whose spectra decide the order: the model's own, or those of a later round
    by       the cost of one more rank in the order: its parameters, or its MACs
    """

    def __init__(
        self,
        model: nn.Module,
        training: TrainingSetup,
        keep: int = 1,
        classifier: str | Collection[str] | None = "auto",
        form: Form = "spatial",
        weights: Mapping[str, Tensor] | None = None,
        by: Literal["parameters", "macs"] = "parameters",
        dense: Collection[str] = (),
    ) -> None:
        self.training = training
        self.smallest_plan = plan_ranks(model, SMALLEST, keep, classifier=classifier, form=form, dense=dense)
        self.layers: dict[str, LayerSpectrum] = layer_spectra(weights or model.state_dict(), self.smallest_plan)
        self._bounds: tuple[Mapping[str, int], Mapping[str, int]] = {}, {}
        self.model, self.keep = model, keep
        self._costs: _MeasuredOnce[Cost] = _MeasuredOnce(self._network)
        self._memories: dict[TrainingMode, _MeasuredOnce[int]] = {}
        if by == "macs":
            self.layers = with_rank_costs(self.layers, self._macs_of_a_rank())
        self.order = rank_order(self.layers)

    @property
    def last(self) -> int:
        """Return the number of the full network."""
        return len(self.order)

    def plan(self, number: int) -> RankPlan:
        levels = levels_after(self.layers, self.order, number)
        low, high = self._bounds
        kept = {name: min(max(level, low.get(name, 1)), high.get(name, level)) for name, level in levels.items()}
        return plan_of_levels(self.smallest_plan, self.layers, kept)

    def between(self, least: Mapping[str, int], most: Mapping[str, int]) -> Self:
        """Return the versions that in every layer have at least the rank of `least` and at most that of `most`."""
        other = copy(self)
        other._bounds = levels_of_plan(self.layers, least), levels_of_plan(self.layers, most)
        return other

    def kept(self, plan: Mapping[str, int]) -> dict[str, float]:
        """Return, by layer, the share of the energy that a plan keeps."""
        levels = levels_of_plan(self.layers, plan)
        return {name: layer.kept(levels[name]) for name, layer in self.layers.items()}

    def modes(self) -> list[TrainingMode]:
        """Return the training modes, the cheapest first. Checkpointing gives the same weights, so it comes early."""
        given = self.training
        blocks = can_checkpoint(self.model, zero_batch(self.model, 1, given.shape, given.dtype))
        least = 2 if running_statistic_names(self.model) else 1  # a single value has no variance for BatchNorm
        found = [TrainingMode(), *([TrainingMode(checkpointing=True)] if blocks else [])]
        size = self.training.batch
        while size // 2 >= least:
            size //= 2
            found.append(TrainingMode(size, blocks))
        return found

    @cached_property
    def _abstract(self) -> nn.Module:
        return copy_network(self.model).to("meta")

    def cost(self, plan: RankPlan) -> Cost:
        """Return the cost of a version."""
        return self._costs.get(plan, lambda network: measure(network, self.training.shape, self.training.dtype))

    def memory(self, plan: RankPlan, mode: TrainingMode) -> int:
        """Return the memory that training a version takes."""
        given = self.training

        def taken(network: nn.Module) -> int:
            how: dict[str, Any] = {"micro_batch": mode.micro_batch, "checkpointing": mode.checkpointing}
            return training_memory(network, given.shape, given.batch, given.dtype, optimizer=given.optimizer, **how)

        return self._memories.setdefault(mode, _MeasuredOnce(self._network)).get(plan, taken)

    def _macs_of_a_rank(self) -> dict[str, float]:
        smallest = self.smallest_plan
        least = self.cost(smallest).macs
        plans = {name: RankPlan({**smallest.decisions, name: 2}, smallest.form) for name in self.layers}
        # ranks of a layer that does not run for a sample cost almost nothing
        return {name: max(1, self.cost(plan).macs - least) for name, plan in plans.items()}

    def _network(self, plan: RankPlan, abstract: bool) -> nn.Module:
        return to_hybrid(self._abstract if abstract else self.model, plan, spectral=False)


class _MeasuredOnce(Generic[Amount]):
    """Measured amounts by version, each measured once."""

    def __init__(self, network: Callable[[RankPlan, bool], nn.Module]) -> None:
        self._network = network
        self._known: dict[tuple[tuple[str, int], ...], Amount] = {}

    def get(self, plan: RankPlan, measured: Callable[[nn.Module], Amount]) -> Amount:
        key = tuple(plan.items())
        if key not in self._known:
            try:
                self._known[key] = measured(self._network(plan, True))
            except FedhmError:  # the model computes with values, which meta tensors do not have
                self._known[key] = measured(self._network(plan, False))
        return self._known[key]


FEWEST = 8  # samples in a micro-batch before ranks are lowered: smaller ones take much longer
FEWEST_NORMALISED = 16  # the same if BatchNorm takes its statistics from micro-batches
PLACES = 128  # versions whose memory is measured at most


@dataclass(frozen=True)
class Expected:
    """The expected cost of training the chosen version."""

    memory: int  # bytes, of a step
    macs: int  # of one sample's forward pass
    bytes: int  # of one transfer, in one direction
    parameters: int
    seconds: float | None = None  # of a step, if it was measured


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
    def mode(self) -> TrainingMode:
        return TrainingMode(self.micro_batch, self.checkpointing)


def fit(
    model: nn.Module,
    sample_shape: tuple[int, ...],
    batch: int = 64,
    memory: float | str | None = None,
    macs: float | str | None = None,
    bytes: float | str | None = None,  # noqa: A002
    parameters: float | str | None = None,
    optimizer: OptimizerName = "sgd",
    *,
    keep: int = 1,
    form: Form = "spatial",
    classifier: str | Collection[str] | None = "auto",
    dense: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Fit:
    """Find the largest version of `model` that meets all budgets, and the cheapest way to train it.

    memory              of a training step on `batch` samples: "128MB", "2MiB", or bytes
    macs                of one sample's forward pass: "50M", or a number
    bytes               of one transfer of the network, in one direction
    parameters          trainable ones
    keep, form, classifier, dense  as in `plan_ranks`
    dtype               of the inputs, if not the weights': torch.int64 for a model that reads tokens

    Ranks are chosen layer by layer from the spectrum of the model's weights (`lowrank/plan.py`). To save memory, the
    first choice is checkpointing, which does not change the weights. Then come micro-batches, and then lower ranks.
    """
    given: dict[Kind, float | str | None] = {"memory": memory, "macs": macs, "bytes": bytes, "parameters": parameters}
    try:
        limits = {kind: parse_amount(size, kind) for kind, size in given.items() if size is not None}
    except ValueError as error:
        raise FedhmError(str(error)) from None
    if not limits:
        raise FedhmError(f"fit needs at least one budget: {', '.join(KINDS)}")
    if batch < 1:
        raise FedhmError(f"a batch has at least one sample, not {batch}")
    by: Literal["parameters", "macs"] = "macs" if set(limits) == {"macs"} else "parameters"
    training = TrainingSetup(sample_shape, batch, optimizer, dtype)
    return fit_versions(ModelVersions(model, training, keep, classifier, form, by=by, dense=dense), limits)


def fit_versions(versions: ModelVersions, limits: Mapping[Kind, int], modes: list[TrainingMode] | None = None) -> Fit:
    """Find the largest version that meets all limits in one of the training modes."""
    static: dict[Kind, int] = {kind: amount for kind, amount in limits.items() if kind != "memory"}
    for kind, amount in static.items():
        _check_smallest(versions, kind, amount)
    number = _largest(lambda n: within_limits(versions.cost(versions.plan(n)), static), versions.last)
    mode = TrainingMode()
    if "memory" in limits:
        number, mode = _in_memory(versions, number, limits["memory"], modes or versions.modes())
    return describe_fit(versions, versions.plan(number), mode, number)


def describe_fit(versions: ModelVersions, plan: RankPlan, mode: TrainingMode, number: int = 0) -> Fit:
    """Return a version with its expected cost."""
    cost = versions.cost(plan)
    expected = Expected(versions.memory(plan, mode), cost.macs, cost.bytes, cost.parameters)
    return Fit(plan, mode.micro_batch, mode.checkpointing, expected, versions.kept(plan), number)


def within_limits(cost: Cost, limits: Mapping[Kind, int]) -> bool:
    return all(getattr(cost, kind) <= amount for kind, amount in limits.items())


def _largest(fits: Callable[[int], bool], last: int) -> int:
    """Return the number of the largest version that fits; 0 always does. A larger budget never gives a smaller one."""
    if fits(last):
        return last
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _in_memory(versions: ModelVersions, number: int, limit: int, modes: list[TrainingMode]) -> tuple[int, TrainingMode]:
    """Return the largest version up to `number` that fits, and the cheapest mode in which it does."""

    def fits(n: int, mode: TrainingMode) -> bool:
        return versions.memory(versions.plan(n), mode) <= limit

    few = FEWEST_NORMALISED if running_statistic_names(versions.model) else FEWEST
    usual = [mode for mode in modes if not mode.micro_batch or mode.micro_batch >= few] or modes[:1]
    last = next((mode for mode in (usual[-1], *modes[len(usual) :]) if fits(0, mode)), None)
    if last is None:
        _refuse_memory(versions, limit, modes)
    assert last is not None
    usual = usual if last in usual else [last]
    if whole := next((mode for mode in usual if fits(number, mode)), None):
        return number, whole
    grid = -(-versions.last // PLACES)  # measuring memory is slow
    number = grid * _largest(lambda n: fits(n * grid, last), number // grid)
    return number, next(mode for mode in usual if fits(number, mode))


def _check_smallest(versions: ModelVersions, kind: Kind, limit: int) -> None:
    least = getattr(versions.cost(versions.plan(0)), kind)
    if least <= limit:
        return
    raise FedhmError(
        f"{kind} = {amount_text(limit, kind)} is too little for this model: its smallest version, of rank 1 in "
        f"{len(versions.layers)} layers, has {amount_text(least, kind)}, most of it in the layers that stay dense (the "
        f"classifier, the first {versions.keep}): give at least so much, or a smaller model"
    )


def _refuse_memory(versions: ModelVersions, limit: int, modes: list[TrainingMode]) -> None:
    plan = versions.plan(0)
    needed, mode = min(((versions.memory(plan, mode), mode) for mode in modes), key=lambda pair: pair[0])
    raise FedhmError(
        f"memory = {amount_text(limit, 'memory')} is too little to train any version of this model: the closest, of "
        f"rank 1 in {len(versions.layers)} layers with {mode}, takes {math.ceil(needed / 1e4) / 100:,.2f} MB for a "
        f"batch of {versions.training.batch}: give at least so much, or a smaller model"
    )

"""The versions of a model between rank 1 everywhere and the full network, and what each takes to train.

They are numbered by how many steps of the order of `lowrank/allocate.py` they are away from the smallest. What they
take is found on torch's meta device, on which tensors have shapes and no numbers, so that nothing is computed.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.lowrank.allocate import Layer, at_cost, layers_of, levels_after, levels_of_plan, order_of, plan_of_levels
from fedhm.lowrank.decompositions.unroll import Form
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import RankPlan, plan_ranks
from fedhm.measure.cost import Cost, measure, sample_of, training_memory
from fedhm.networks.batchnorm import running_names
from fedhm.networks.less_memory.repeatable import can_checkpoint
from fedhm.networks.structure import copied

SMALLEST = 1e-9  # a ratio at which every layer has rank 1
Amount = TypeVar("Amount")


@dataclass(frozen=True)
class Mode:
    """How a version is trained: what saves memory, at the price of time."""

    micro_batch: int = 0  # 0: a batch goes through the network at once
    checkpointing: bool = False

    def __str__(self) -> str:
        parts = ["checkpointing"] if self.checkpointing else []
        parts += [f"micro-batches of {self.micro_batch}"] if self.micro_batch else []
        return " and ".join(parts) or "nothing to save memory"


@dataclass(frozen=True)
class Training:
    """On what, and how, versions are to be trained."""

    shape: tuple[int, ...]  # of one input
    batch: int
    optimizer: str = "sgd"
    dtype: torch.dtype | None = None  # of the inputs; None: that of the weights


class Versions:
    """Versions of `model`, whose spectrum is that of `weights`, the model's own or those of a later round.

    by  what directions are weighed against: the parameters of one more rank, or its MACs
    """

    def __init__(
        self,
        model: nn.Module,
        training: Training,
        keep: int = 1,
        classifier: str | None = "auto",
        form: Form = "spatial",
        weights: Mapping[str, Tensor] | None = None,
        by: Literal["parameters", "macs"] = "parameters",
    ) -> None:
        self.training = training
        self.smallest_plan = plan_ranks(model, SMALLEST, keep, classifier=classifier, form=form)
        self.layers: dict[str, Layer] = layers_of(weights or model.state_dict(), self.smallest_plan)
        self._bounds: tuple[Mapping[str, int], Mapping[str, int]] = {}, {}
        self.model, self.keep = model, keep
        self._costs: _Found[Cost] = _Found(self._network)
        self._memories: dict[Mode, _Found[int]] = {}
        if by == "macs":
            self.layers = at_cost(self.layers, self._macs_of_a_rank())
        self.order = order_of(self.layers)

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
        """Return the versions no smaller in any layer than the plan `least`, and no larger than the plan `most`."""
        other = copy(self)
        other._bounds = levels_of_plan(self.layers, least), levels_of_plan(self.layers, most)
        return other

    def kept(self, plan: Mapping[str, int]) -> dict[str, float]:
        """Return, by layer, the share of its energy that a plan keeps."""
        levels = levels_of_plan(self.layers, plan)
        return {name: layer.kept(levels[name]) for name, layer in self.layers.items()}

    def modes(self) -> list[Mode]:
        """Return the ways to train, the cheapest first: checkpointing gives the same weights, so it comes early."""
        given = self.training
        blocks = can_checkpoint(self.model, sample_of(self.model, 1, given.shape, given.dtype))
        least = 2 if running_names(self.model) else 1  # BatchNorm has no variance of a single value
        found = [Mode(), *([Mode(checkpointing=True)] if blocks else [])]
        size = self.training.batch
        while size // 2 >= least:
            size //= 2
            found.append(Mode(size, blocks))
        return found

    @cached_property
    def _abstract(self) -> nn.Module:
        return copied(self.model).to("meta")

    def cost(self, plan: RankPlan) -> Cost:
        """Return what a version costs."""
        return self._costs.found(plan, lambda network: measure(network, self.training.shape, self.training.dtype))

    def memory(self, plan: RankPlan, mode: Mode) -> int:
        """Return the memory that training a version takes."""
        given = self.training

        def taken(network: nn.Module) -> int:
            how: dict[str, Any] = {"micro_batch": mode.micro_batch, "checkpointing": mode.checkpointing}
            return training_memory(network, given.shape, given.batch, given.dtype, optimizer=given.optimizer, **how)

        return self._memories.setdefault(mode, _Found(self._network)).found(plan, taken)

    def _macs_of_a_rank(self) -> dict[str, float]:
        smallest = self.smallest_plan
        least = self.cost(smallest).macs
        plans = {name: RankPlan({**smallest.decisions, name: 2}, smallest.form) for name in self.layers}
        # of a layer that does not run for a sample, ranks cost next to nothing
        return {name: max(1, self.cost(plan).macs - least) for name, plan in plans.items()}

    def _network(self, plan: RankPlan, abstract: bool) -> nn.Module:
        return to_hybrid(self._abstract if abstract else self.model, plan, spectral=False)


class _Found(Generic[Amount]):
    """What was found of versions, each asked once."""

    def __init__(self, network: Callable[[RankPlan, bool], nn.Module]) -> None:
        self._network = network
        self._known: dict[tuple[tuple[str, int], ...], Amount] = {}

    def found(self, plan: RankPlan, measured: Callable[[nn.Module], Amount]) -> Amount:
        key = tuple(plan.items())
        if key not in self._known:
            try:
                self._known[key] = measured(self._network(plan, True))
            except FedhmError:  # it computes with numbers, which meta tensors have not
                self._known[key] = measured(self._network(plan, False))
        return self._known[key]

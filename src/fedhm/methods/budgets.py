"""The rank plan of a tier, for the methods whose tiers are rank ratios."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from warnings import warn

from torch import nn

from fedhm.config.section import tier_name
from fedhm.config.units import Budget, Kind
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.lowrank.plan import RankPlan, plan_ranks
from fedhm.lowrank.svd import Form
from fedhm.measure.fit import SMALLEST, Fit, ModelVersions, TrainingMode, TrainingSetup, fit_versions
from fedhm.methods.method import Setup
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.networks.inputs import require_tensor


def tier_plan(model: nn.Module, ratio: float, keep: int, classifier: str | None, form: Form = "spatial") -> RankPlan:
    """Return a tier's rank plan; one below full must differ from it. `classifier` gives the logits, where known."""
    plan = plan_ranks(model, ratio, keep, classifier=classifier or "auto", form=form)
    if not plan and ratio < 1:
        raise FedhmError(
            f"there is nothing to factorize for tier {tier_name(ratio)}: every layer stays dense; "
            f"choose a smaller ratio or a smaller method.keep\n{plan}"
        )
    return plan


# Tiers that are budgets: which version each affords, found from the spectrum of the weights, and how it is trained.
#
# A plan may be another one after some rounds. So the names of networks carry the ranks: "bytes:2MB=8.8.16.0", in the
# order of the layers, 0 for one that is dense. Whoever gets a task, here or on a node, needs to know nothing else.


@dataclass(frozen=True)
class Planned:
    """The version of one tier."""

    ranks: dict[str, int]  # by layer; one that is not there is dense
    micro_batch: int
    checkpointing: bool

    @property
    def options(self) -> dict[str, float]:
        """Return what tasks say of how to train, where it is not as the run's settings say."""
        how = {"micro_batch": float(self.micro_batch), "checkpointing": float(self.checkpointing)}
        return how if any(how.values()) else {}


class TierBudgets:
    """The budgets among a method's tiers, and the versions of the model that they afford."""

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        tiers: Mapping[str, Budget | RankPlan],  # largest first
        keep: int,
        form: Form,
    ) -> None:
        self._model, self._setup, self._tiers, self._keep, self._form = model, setup, tiers, keep, form
        self._smallest = plan_ranks(model, SMALLEST, keep, classifier=setup.classifier or "auto", form=form)
        ratios = [plan for plan in tiers.values() if isinstance(plan, RankPlan)]
        for larger, smaller in itertools.pairwise(ratios):
            if any(rank > larger.get(layer, rank) for layer, rank in smaller.items()) or larger.keys() - smaller.keys():
                raise FedhmError("method.tiers: with budgets among them, ratios too are listed with the largest first")
        if not self._smallest:
            raise FedhmError(f"there is nothing to factorize for a budget: every layer stays dense\n{self._smallest}")

    @cached_property
    def first(self) -> dict[str, Planned]:
        """Return the versions by the weights that the model comes with."""
        return self.planned(exchanged_tensors(self._model), check=True)

    def planned(self, weights: Tensors, *, check: bool = False) -> dict[str, Planned]:
        """Return the version of each budget; with `check`, refuse tiers that are not in the order of their sizes."""
        sample, train = self._setup.sample, self._setup.train
        if sample is None or train is None:
            raise FedhmError("tiers that are budgets need a sample and the training's settings: use fedhm.assemble")
        sample = require_tensor(sample, "a tier that is a budget")
        training = TrainingSetup(tuple(sample.shape[1:]), train.batch, train.optimizer, sample.dtype)
        scarce = {kind for tier in self._tiers.values() if isinstance(tier, Budget) for kind in tier.limits}
        classifier = self._setup.classifier or "auto"
        versions = ModelVersions(
            self._model, training, self._keep, classifier, self._form, weights,
            "macs" if scarce == {"macs"} else "parameters",
        )  # fmt: skip
        settled = bool(train.micro_batch or train.checkpointing)
        modes = [TrainingMode(train.micro_batch, bool(train.checkpointing))] if settled else None
        found: dict[str, Planned] = {}
        above = self.plan({})  # the full network's
        for tier, budget in self._tiers.items():
            if isinstance(budget, RankPlan):
                above = budget
                continue
            limits = self._amounts(budget, versions)
            below = self._below(tier)
            within = versions.between(self._smallest if below is None else below, above)
            fit = partial(fit_versions, limits=limits, modes=modes)
            if check:
                self._check_order(tier, versions, above, fit)
            fitted = fit(within)
            self._warn(tier, fitted)
            above = fitted.plan
            how = (0, False) if settled else (fitted.micro_batch, fitted.checkpointing)
            found[tier] = Planned(dict(fitted.plan), *how)
        return found

    def _check_order(
        self, tier: str, versions: ModelVersions, above: RankPlan, fit: Callable[[ModelVersions], Fit]
    ) -> None:
        """Refuse a tier that affords less than a ratio after it, or more than the tier before it."""
        free = fit(versions.between(self._smallest, above))
        parameters = {name: versions.cost(plan).parameters for name, plan in (("own", free.plan), ("above", above))}
        if (below := self._below(tier)) is not None and versions.cost(below).parameters > parameters["own"]:
            raise FedhmError(f"method.tiers: '{tier}' affords less than a tier after it: list the largest first")
        if parameters["own"] == parameters["above"] and above:
            largest = fit(versions.between(self._smallest, {}))
            if largest.expected.parameters > parameters["above"]:
                raise FedhmError(f"method.tiers: '{tier}' affords more than the tier before it: list the largest first")

    def _below(self, tier: str) -> RankPlan | None:
        """Return the plan of the next tier that is a ratio: no budget before it has smaller ranks."""
        names = list(self._tiers)
        after = (self._tiers[name] for name in names[names.index(tier) + 1 :])
        return next((plan for plan in after if isinstance(plan, RankPlan)), None)

    def _amounts(self, budget: Budget, versions: ModelVersions) -> dict[Kind, int]:
        classifier = self._setup.classifier or "auto"

        def amount(kind: Kind, limit: int | Fraction) -> int:
            if isinstance(limit, int):
                return limit
            plan = plan_ranks(self._model, float(limit), self._keep, classifier=classifier, form=self._form)
            taken: int = getattr(versions.cost(plan), kind)
            return taken

        return {kind: amount(kind, limit) for kind, limit in budget.limits.items()}

    def _warn(self, tier: str, fitted: Fit) -> None:
        if fitted.micro_batch and running_statistic_names(self._model):
            warn(
                f"tier {tier} trains in micro-batches of {fitted.micro_batch}, and BatchNorm layers normalise by the "
                "statistics of so many samples",
                FedhmWarning,
                stacklevel=2,
            )

    def name(self, tier: str, ranks: Mapping[str, int]) -> str:
        """Return the name of the network that a tier has with these ranks."""
        return f"{tier}={'.'.join(str(ranks.get(layer, 0)) for layer in self._smallest)}"

    def plan_of_name(self, name: str) -> RankPlan:
        """Return the rank plan of a network by its name; without ranks in it, that of the first weights."""
        tier, _, listed = name.partition("=")
        if not listed:
            return self.plan(self.first[tier].ranks)
        ranks = dict(zip(self._smallest, map(int, listed.split(".")), strict=True))
        return self.plan({layer: rank for layer, rank in ranks.items() if rank})

    def plan(self, ranks: Mapping[str, int]) -> RankPlan:
        decisions = {layer: ranks.get(layer, "afforded as it is") for layer in self._smallest}
        return RankPlan({**self._smallest.decisions, **decisions}, self._form)

    def ratio(self, ranks: Mapping[str, int]) -> float:
        """Return the rank ratio that these ranks come to in the mean, for weightings that go by it."""
        weights = dict(self._model.named_parameters())
        sizes = {layer: min(weights[f"{layer}.weight"].shape[:2]) for layer in self._smallest}
        return sum(min(1.0, ranks.get(layer, size) / size) for layer, size in sizes.items()) / len(sizes)


def budgets_of(tiers: Sequence[float | str]) -> bool:
    """Tell whether there is a budget among tiers."""
    return any(isinstance(tier, str) for tier in tiers)

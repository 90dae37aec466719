"""From tiers to rank plans: which version of the model each tier trains, by a rank ratio, a share or a budget.

A rank ratio decides on ranks by itself. A share of the parameters ("50%") becomes the largest ratio within it. A budget
("memory:128MB") affords a version: ranks are chosen layer by layer from the spectrum of the weights, so the version may
change when it is planned again after some rounds.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any
from warnings import warn

from torch import nn

from fedhm.config.section import tier_name
from fedhm.config.units import Budget, Kind, is_share, parse_budget, parse_share
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.lowrank.layers import dense_weight_name
from fedhm.lowrank.plan import RankPlan, plan_ranks, ratio_of_share
from fedhm.lowrank.svd import Form
from fedhm.measure.cost import sample_spec
from fedhm.measure.fit import SMALLEST, Fit, ModelVersions, TrainingMode, TrainingSetup, fit_versions
from fedhm.methods.advice import nothing_to_factorize, share_out_of_reach, too_large
from fedhm.methods.method import Setup
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.work.messages import TaskOptions

FULL = tier_name(1)


@dataclass(frozen=True)
class TierPlan:
    """The version of the model that a tier trains, and how its clients save memory."""

    ranks: dict[str, int]  # of the factorized layers; all other layers are dense
    ratio: float  # γ: the tier's rank ratio, or the mean ratio of the ranks that a budget affords
    micro_batch: int = 0  # 0, False: as the settings say
    checkpointing: bool = False

    @property
    def options(self) -> TaskOptions:
        """Return what tasks say of saving memory, where that differs from the run's settings."""
        if not (self.micro_batch or self.checkpointing):
            return TaskOptions()
        return TaskOptions(micro_batch=self.micro_batch, checkpointing=self.checkpointing)


def ratio_plan(
    model: nn.Module,
    ratio: float,
    keep: int,
    classifier: str | Collection[str] | None,
    form: Form = "spatial",
    max_rank: int = 0,
    dense: Collection[str] = (),
) -> RankPlan:
    """Return the rank plan of a tier that is a ratio. A tier below full must factorize something."""
    plan = plan_ranks(model, ratio, keep, classifier=classifier or "auto", form=form, max_rank=max_rank, dense=dense)
    if not plan and ratio < 1:
        raise FedhmError(nothing_to_factorize(model, plan, tier_name(ratio)))
    return plan


class TierPlanner:
    """Plans all tiers of a method. A method with ratios alone gets the same plans for any weights.

    levels  the tier of each capability level, largest first
    tiers   the same, each once
    """

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        tiers: Sequence[float | str],
        keep: int = 1,
        form: Form = "spatial",
        max_rank: int = 0,
        dense: Collection[str] = (),
    ) -> None:
        self._model, self._setup, self._keep, self._form, self._dense = model, setup, keep, form, dense
        self._max_rank = max_rank
        ratios = [tier for tier in tiers if not isinstance(tier, str)]
        self.has_budgets = has_budgets(tiers)
        # budgets and shares are listed by size: which affords more, only the model can tell
        ordered = sorted(ratios, reverse=True) if len(ratios) == len(tiers) else tiers
        self.levels = tuple(tier_name(tier) for tier in ordered)
        self.tiers = tuple(dict.fromkeys(self.levels))
        # the full network is planned whatever the tiers: warm-up rounds train it
        self._ratios = {FULL: 1.0} | {
            tier_name(tier): self._ratio_of_share(tier) if isinstance(tier, str) else tier
            for tier in tiers
            if not isinstance(tier, str) or is_share(tier)
        }
        self._ratio_plans = {
            tier: ratio_plan(model, ratio, keep, setup.output_layers, form, max_rank, dense)
            for tier, ratio in self._ratios.items()
        }
        if len(ratios) < len(tiers):
            self._check_listing()

    def _plan(self, ratio: float) -> RankPlan:
        options: dict[str, Any] = {"form": self._form, "dense": self._dense, "max_rank": self._max_rank}
        return plan_ranks(self._model, ratio, self._keep, classifier=self._classifier, **options)

    def _ratio_of_share(self, tier: str) -> float:
        """Return the largest ratio at which the model keeps at most the share of its parameters that a tier names."""
        ratio = ratio_of_share(self._model, parse_share(tier), self._plan)
        if ratio is None:
            smallest = self._plan(SMALLEST)
            if not smallest:
                raise FedhmError(nothing_to_factorize(self._model, smallest, tier))
            raise FedhmError(share_out_of_reach(self._model, smallest, tier))
        return ratio

    @property
    def remarks(self) -> list[str]:
        """Return a sentence for each tier that saves next to nothing. Budgets and shares were asked for by size."""
        plans = ((tier, plan) for tier, plan in self._ratio_plans.items() if tier != FULL and not is_share(tier))
        return [sentence for tier, plan in plans if (sentence := too_large(self._model, plan, tier))]

    @property
    def ratios(self) -> Mapping[str, float]:
        """Return the tiers that are ratios, the full one among them."""
        return self._ratios

    @cached_property
    def first(self) -> dict[str, TierPlan]:
        """Return the plans by the weights that the model comes with."""
        return self.plan(exchanged_tensors(self._model), check=True)

    def plan(self, weights: Tensors, *, check: bool = False) -> dict[str, TierPlan]:
        """Return the plan of every tier; with `check`, refuse tiers that are not in the order of their sizes."""
        fixed = {
            tier: TierPlan(dict(self._ratio_plans[tier]), ratio) for tier, ratio in self._ratios.items()
        }  # whatever the weights
        return fixed | self._afforded(weights, check) if self.has_budgets else fixed

    def label(self, tier: str, plan: TierPlan) -> str:
        """Return what a tier's network is called, where that is not the tier: a budget's ranks may change."""
        if tier in self._ratios:
            return ""
        return f"{tier}={'.'.join(str(plan.ranks.get(layer, 0)) for layer in self._smallest)}"

    def is_budget(self, tier: str) -> bool:
        return tier not in self._ratios

    # Budgets

    @cached_property
    def _smallest(self) -> RankPlan:
        """Return the smallest version of all: its layers are those that a budget may factorize."""
        return self._plan(SMALLEST)

    @property
    def _classifier(self) -> str | Collection[str]:
        return self._setup.output_layers or "auto"

    @cached_property
    def _budgets(self) -> dict[str, Budget | RankPlan]:
        """Return every tier as a budget, or as the plan of a ratio, largest first."""
        return {tier: self._ratio_plans[tier] if tier in self._ratios else parse_budget(tier) for tier in self.tiers}

    def _check_listing(self) -> None:
        """Refuse tiers that are not listed by their size, and budgets for a model without layers to factorize."""
        plans = [plan for plan in self._budgets.values() if isinstance(plan, RankPlan)]
        for larger, smaller in itertools.pairwise(plans):
            if any(rank > larger.get(layer, rank) for layer, rank in smaller.items()) or larger.keys() - smaller.keys():
                raise FedhmError(
                    "method.tiers: with budgets or shares among them, all tiers are listed with the largest first"
                )
        if not self._smallest:
            raise FedhmError(nothing_to_factorize(self._model, self._smallest, self.tiers[-1]))

    def _afforded(self, weights: Tensors, check: bool) -> dict[str, TierPlan]:
        """Return the largest version within each budget, no larger than the tier before it."""
        sample, train = self._setup.sample, self._setup.train
        if sample is None or train is None:
            raise FedhmError("tiers that are budgets need a sample and the training's settings: use fedhm.assemble")
        shape, dtype = sample_spec(sample)
        training = TrainingSetup(shape, train.batch, train.optimizer, dtype)
        scarce = {kind for tier in self._budgets.values() if isinstance(tier, Budget) for kind in tier.limits}
        versions = ModelVersions(
            self._model,
            training,
            self._keep,
            self._classifier,
            self._form,
            weights,
            "macs" if scarce == {"macs"} else "parameters",
            self._dense,
        )
        settled = bool(train.micro_batch or train.checkpointing)
        modes = [TrainingMode(train.micro_batch, bool(train.checkpointing))] if settled else None
        found: dict[str, TierPlan] = {}
        above = self._rank_plan({})  # the full network's
        for tier, budget in self._budgets.items():
            if isinstance(budget, RankPlan):
                above = budget
                continue
            fit = partial(fit_versions, limits=self._amounts(budget, versions), modes=modes)
            if check:
                self._check_order(tier, versions, above, fit)
            below = self._next_ratio(tier)
            fitted = fit(versions.between(self._smallest if below is None else below, above))
            self._warn_of_small_batches(tier, fitted)
            above = fitted.plan
            ranks = dict(self._rank_plan(fitted.plan))
            saving = (0, False) if settled else (fitted.micro_batch, fitted.checkpointing)
            found[tier] = TierPlan(ranks, self._mean_ratio(ranks), micro_batch=saving[0], checkpointing=saving[1])
        return found

    def _check_order(
        self, tier: str, versions: ModelVersions, above: RankPlan, fit: Callable[[ModelVersions], Fit]
    ) -> None:
        """Refuse a tier that affords less than a ratio after it, or more than the tier before it."""
        own = versions.cost(fit(versions.between(self._smallest, above)).plan).parameters
        largest_allowed = versions.cost(above).parameters
        below = self._next_ratio(tier)
        if below is not None and versions.cost(below).parameters > own:
            raise FedhmError(f"method.tiers: '{tier}' affords less than a tier after it: list the largest first")
        if own == largest_allowed and above:
            largest = fit(versions.between(self._smallest, {}))
            if largest.expected.parameters > largest_allowed:
                raise FedhmError(f"method.tiers: '{tier}' affords more than the tier before it: list the largest first")

    def _next_ratio(self, tier: str) -> RankPlan | None:
        """Return the plan of the next tier that is a ratio: no budget before it has smaller ranks."""
        after = (self._budgets[name] for name in self.tiers[self.tiers.index(tier) + 1 :])
        return next((plan for plan in after if isinstance(plan, RankPlan)), None)

    def _amounts(self, budget: Budget, versions: ModelVersions) -> dict[Kind, int]:
        """Return a budget in numbers: a limit such as bytes:1/8 is what the version at that ratio takes."""

        def amount(kind: Kind, limit: int | Fraction) -> int:
            if isinstance(limit, int):
                return limit
            taken: int = getattr(versions.cost(self._plan(float(limit))), kind)
            return taken

        return {kind: amount(kind, limit) for kind, limit in budget.limits.items()}

    def _warn_of_small_batches(self, tier: str, fitted: Fit) -> None:
        if fitted.micro_batch and running_statistic_names(self._model):
            warn(
                f"tier {tier} trains in micro-batches of {fitted.micro_batch}, and BatchNorm layers normalise by the "
                "statistics of so many samples",
                FedhmWarning,
                stacklevel=2,
            )

    def _rank_plan(self, ranks: Mapping[str, int]) -> RankPlan:
        """Return ranks as a plan that says of every layer why it is dense."""
        decisions = {layer: ranks.get(layer, "afforded as it is") for layer in self._smallest}
        return RankPlan({**self._smallest.decisions, **decisions}, self._form)

    def _mean_ratio(self, ranks: Mapping[str, int]) -> float:
        """Return the mean ratio of ranks to whole ranks, for weightings that go by γ."""
        weights = dict(self._model.named_parameters())
        sizes = {layer: min(weights[dense_weight_name(layer)].shape[:2]) for layer in self._smallest}
        return sum(min(1.0, ranks.get(layer, size) / size) for layer, size in sizes.items()) / len(sizes)


def has_budgets(tiers: Sequence[float | str]) -> bool:
    """Tell whether there is a budget among tiers."""
    return any(isinstance(tier, str) and not is_share(tier) for tier in tiers)

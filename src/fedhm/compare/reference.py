"""FedHM's tiers on a config's model, which the tiers of all other methods in a comparison are matched to."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from typing import Self, TypeVar

from torch import Tensor, nn

from fedhm.assembly import Design, named_design
from fedhm.compare.compared import Compared
from fedhm.config.plugins import make
from fedhm.config.sections.method_config import Settings
from fedhm.config.settings import CompareConfig, Config
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import plan_ranks
from fedhm.measure.cost import LayerCost, by_layer, form_of
from fedhm.methods.tier_budgets import budgets_of
from fedhm.widths.narrow import narrowed
from fedhm.widths.width_plan import plan_widths

Number = TypeVar("Number", int, float)
WIDTHS = [hundredths / 100 for hundredths in range(1, 101)]
RATIOS = [parts / 64 for parts in range(1, 65)]  # all have a name that is a fraction


class Reference:
    """The `Sizes` that methods match theirs to."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._given = config.compare or CompareConfig()
        self.rounds = config.train.rounds

    def with_rounds(self, rounds: int) -> Self:
        """Return the same sizes for runs of another length."""
        other = copy(self)
        other.rounds = rounds
        return other

    @cached_property
    def fedhm(self) -> Settings:
        """Return FedHM's settings: the config's, or the defaults at the tiers that the config's method has."""
        default = make("methods", "fedhm")
        tiers = list(self._config.method.rank_ratios or default.rank_ratios)
        return self.given_settings(default.name) or {**default.model_dump(mode="json"), "tiers": tiers}

    @property
    def adapters(self) -> Settings:
        """Return the settings of the config's adapters, which those of other methods share."""
        return self._config.method.adapters

    @property
    def keep(self) -> int:
        kept: int = self.fedhm["keep"]
        return kept

    @cached_property
    def ratios(self) -> list[float]:
        """Return FedHM's tiers, largest first; one with two shares of the clients comes twice.

        In place of a budget stands the ratio with as many parameters as what it affords of the first weights.
        """
        tiers: list[float | str] = self.fedhm["tiers"]
        sizes = self._sizes if budgets_of(tiers) else [0] * len(tiers)  # ratios alone need no model
        both = zip(tiers, sizes, strict=True)
        return sorted((self._nearest_ratio(n) if isinstance(tier, str) else tier for tier, n in both), reverse=True)

    def given_settings(self, method: str) -> Settings | None:
        """Return a config's own [method] section, for the method that it names."""
        own = self._config.method
        return own.model_dump(mode="json") if own.name == method else None

    @cached_property
    def widths(self) -> list[float]:
        """Return the widths of methods that slim the model: given, or with as many parameters as FedHM's tiers."""
        given = self._one_for_each_tier("widths", sorted(self._given.widths, reverse=True))
        return given or [self._nearest_width(size) for size in self._sizes]

    @cached_property
    def bases(self) -> list[int]:
        """Return how many of the narrowest networks Split-Mix gives to each tier."""
        if given := self._one_for_each_tier("bases", sorted(self._given.bases, reverse=True)):
            return given
        base = self._narrow_size(min(self.widths))
        return [max(1, round(size / base)) for size in self._sizes]

    def _one_for_each_tier(self, key: str, given: list[Number]) -> list[Number]:
        tiers = len(self.fedhm["tiers"])
        if given and len(given) != tiers:
            raise FedhmError(f"compare.{key} has {len(given)} sizes, but FedHM has {tiers} tiers to match")
        return given

    def layers(self) -> dict[str, dict[str, LayerCost]]:
        """Return tier → layer → cost, of the full model and FedHM's tiers."""
        method, (shape, _) = self._design.method, form_of(self._design.sample)
        networks = {"full": self._design.model} | {tier: method.network(tier) for tier in method.tiers}
        return {tier: by_layer(network, shape) for tier, network in networks.items()}

    @cached_property
    def _design(self) -> Design:
        method = make("methods", "fedhm").model_validate(self.fedhm)
        return named_design(self._config.model_copy(update={"method": method}))

    @cached_property
    def _sizes(self) -> list[int]:
        """Return the number of parameters of each of FedHM's levels."""
        method = self._design.method
        sizes = {tier: _parameters(method.network(tier)) for tier in method.tiers}
        return [sizes[tier] for tier in method.levels]

    def _narrow_size(self, width: float) -> int:
        model, sample, classifier = self._design.model, self._design.sample, self._design.classifier
        if not isinstance(sample, Tensor):
            raise FedhmError("methods of widths are for models whose input is one tensor: leave them out of --methods")
        return _parameters(narrowed(model, plan_widths(model, width, sample, classifier)))

    def _nearest_width(self, size: int) -> float:
        return _nearest(WIDTHS, self._narrow_size, size)

    def _ratio_size(self, ratio: float) -> int:
        model, classifier = self._design.model, self._design.classifier or "auto"
        plan = plan_ranks(model, ratio, self.keep, classifier=classifier, form=self.fedhm["form"])
        return _parameters(to_hybrid(model, plan, spectral=False))

    def _nearest_ratio(self, size: int) -> float:
        return _nearest(RATIOS, self._ratio_size, size)


def layers_of(entries: Sequence[Compared]) -> dict[str, dict[str, LayerCost]]:
    """Return costs by tier and layer of the model that a config names; nothing where it was handed over in Python."""
    configs = [entry.first.config for entry in entries if entry.first.config.model and entry.first.config.data]
    configs.sort(key=lambda config: not config.method.rank_ratios)  # whose tiers are the ones to show
    return Reference(configs[0]).layers() if configs else {}


def _nearest(choices: Sequence[float], size_of: Callable[[float], int], size: int) -> float:
    """Return the choice, of which larger ones are larger, at which the number of parameters is nearest to `size`."""
    above = bisect_right(choices, size, key=size_of)  # of equal ones, the largest
    return min(choices[max(0, above - 1) : above + 1], key=lambda choice: abs(size_of(choice) - size))


def _parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)

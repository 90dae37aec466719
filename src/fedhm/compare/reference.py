"""FedHM's tiers on a config's model, which the tiers of all other methods in a comparison are matched to."""

from bisect import bisect_right
from copy import copy
from functools import cached_property
from typing import Self, TypeVar

from torch import nn

from fedhm.assembly import Design, named_design
from fedhm.config.method_config import Settings
from fedhm.config.plugins import make
from fedhm.config.settings import CompareConfig, Config
from fedhm.errors import FedhmError
from fedhm.measure.cost import LayerCost, by_layer
from fedhm.widths.narrow import narrowed
from fedhm.widths.width_plan import plan_widths

Number = TypeVar("Number", int, float)
WIDTHS = [hundredths / 100 for hundredths in range(1, 101)]


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
    def keep(self) -> int:
        kept: int = self.fedhm["keep"]
        return kept

    @property
    def ratios(self) -> list[float]:
        """Return FedHM's tiers, largest first; one with two shares of the clients comes twice."""
        return sorted(self.fedhm["tiers"], reverse=True)

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
        if given and len(given) != len(self.ratios):
            raise FedhmError(f"compare.{key} has {len(given)} sizes, but FedHM has {len(self.ratios)} tiers to match")
        return given

    def layers(self) -> dict[str, dict[str, LayerCost]]:
        """Return tier → layer → cost, of the full model and FedHM's tiers."""
        method, shape = self._design.method, tuple(self._design.sample.shape[1:])
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
        return _parameters(narrowed(model, plan_widths(model, width, sample, classifier)))

    def _nearest_width(self, size: int) -> float:
        """Return the width, in steps of a hundredth, at which the number of parameters is nearest to `size`."""
        above = bisect_right(WIDTHS, size, key=self._narrow_size)  # of equal ones, the widest
        return min(WIDTHS[max(0, above - 1) : above + 1], key=lambda width: abs(self._narrow_size(width) - size))


def _parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)

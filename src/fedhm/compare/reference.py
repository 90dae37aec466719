"""FedHM's tiers on a config's model, which the tiers of all other methods in a comparison are matched to."""

from bisect import bisect_right
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from fedhm.config.method import FedHMConfig
from fedhm.config.settings import CompareConfig, Config
from fedhm.errors import FedhmError
from fedhm.measure.cost import LayerCost, by_layer
from fedhm.methods import make_method
from fedhm.methods.method import Setup
from fedhm.networks.probe import probe
from fedhm.run import build_model, input_format
from fedhm.widths.narrow import narrowed
from fedhm.widths.width_plan import plan_widths

Number = TypeVar("Number", int, float)
WIDTHS = [hundredths / 100 for hundredths in range(1, 101)]


class Reference:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._given = config.compare or CompareConfig()
        self.fedhm = config.method if isinstance(config.method, FedHMConfig) else FedHMConfig()
        self.rounds = config.train.rounds

    @property
    def ratios(self) -> list[float]:
        """Of FedHM's tiers, largest first; one with two shares of the clients comes twice."""
        return sorted(self.fedhm.tiers, reverse=True)

    def given_settings(self, method: str) -> dict[str, Any] | None:
        """A config's own [method] section goes for the method that it names."""
        own = self._config.method
        return own.model_dump(mode="json") if own.name == method and not isinstance(own, FedHMConfig) else None

    @cached_property
    def widths(self) -> list[float]:
        """Of the methods that slim the model: given, or with as many parameters as FedHM's tiers have."""
        given = self._one_for_each_tier("widths", sorted(self._given.widths, reverse=True))
        return given or [self._nearest_width(size) for size in self._sizes]

    @cached_property
    def bases(self) -> list[int]:
        """How many of the narrowest networks Split-Mix gives to each tier."""
        if given := self._one_for_each_tier("bases", sorted(self._given.bases, reverse=True)):
            return given
        base = self._narrow_size(min(self.widths))
        return [max(1, round(size / base)) for size in self._sizes]

    def _one_for_each_tier(self, key: str, given: list[Number]) -> list[Number]:
        if given and len(given) != len(self.ratios):
            raise FedhmError(f"compare.{key} has {len(given)} sizes, but FedHM has {len(self.ratios)} tiers to match")
        return given

    def layers(self) -> dict[str, dict[str, LayerCost]]:
        """Tier → layer → cost, of the full model and FedHM's tiers."""
        model, setup = self._setup
        assert setup.sample is not None
        method = make_method(model, self.fedhm, setup)
        networks = {"full": model} | {tier: method.network(tier) for tier in method.tiers}
        return {tier: by_layer(network, tuple(setup.sample.shape[1:])) for tier, network in networks.items()}

    @cached_property
    def _setup(self) -> tuple[nn.Module, Setup]:
        shape, classes = input_format(self._config)
        model, sample = build_model(self._config, shape, classes), torch.zeros(1, *shape)
        return model, Setup(probe(model, sample, classes), sample)

    @cached_property
    def _sizes(self) -> list[int]:
        """Parameters of FedHM's levels."""
        model, setup = self._setup
        method = make_method(model, self.fedhm, setup)
        sizes = {tier: _parameters(method.network(tier)) for tier in method.tiers}
        return [sizes[tier] for tier in method.levels]

    def _narrow_size(self, width: float) -> int:
        model, setup = self._setup
        assert setup.sample is not None
        return _parameters(narrowed(model, plan_widths(model, width, setup.sample, setup.classifier)))

    def _nearest_width(self, size: int) -> float:
        """In steps of a hundredth."""
        above = bisect_right(WIDTHS, size, key=self._narrow_size)  # of equal ones, the widest
        return min(WIDTHS[max(0, above - 1) : above + 1], key=lambda width: abs(self._narrow_size(width) - size))


def _parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)

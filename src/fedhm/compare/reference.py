"""FedHM's tiers on a config's model, which the tiers of all other methods in a comparison are matched to."""

from functools import cached_property

from fedhm.config import CompareConfig, Config
from fedhm.method_config import FedHMConfig


class Reference:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._given = config.compare or CompareConfig()
        self.fedhm = config.method if isinstance(config.method, FedHMConfig) else FedHMConfig()
        self.rounds = config.train.rounds

    @property
    def ratios(self) -> list[float]:
        return sorted(self.fedhm.tiers, reverse=True)

    @cached_property
    def widths(self) -> list[float]:
        raise NotImplementedError

    @cached_property
    def bases(self) -> list[int]:
        raise NotImplementedError

"""The settings of a method: what reading, running, reports and comparisons know of any of them.

A method is one file, with a subclass of `MethodConfig` in it:

    class MyMethod(MethodConfig):
        name: Literal["mine"] = "mine"
        share: float = 0.5                       # a setting: method.share in a config

        def build(self, model, setup):
            return Running(self, model, setup)   # a fedhm.Method
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from fedhm.config.section import Section
from fedhm.errors import FedhmError

Settings = dict[str, Any]  # of a [method] section
Number = TypeVar("Number", int, float)


class Sizes(Protocol):
    """FedHM's tiers in a comparison, which the tiers of all other methods are matched to."""

    @property
    def fedhm(self) -> Settings: ...
    @property
    def adapters(self) -> Settings:
        """Return the settings of the config's adapters, if its method trains such."""
        ...

    @property
    def keep(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def ratios(self) -> list[float]:
        """Return the rank ratios, largest first; one with two shares of the clients comes twice."""
        ...

    @property
    def widths(self) -> list[float]:
        """Return widths with as many parameters as the ratios."""
        ...

    @property
    def bases(self) -> list[int]:
        """Return how many networks of the smallest width have as many parameters as each ratio."""
        ...


@dataclass(frozen=True)
class NamedEntry:
    """What a name in `fedhm compare --methods` stands for: a method with its settings, run once for each seed."""

    name: str
    settings: Callable[[Sizes], Settings]


@dataclass(frozen=True)
class Family:
    """A name that stands for several entries, NAME:SIZE, one for each size below the full model."""

    name: str
    members: Callable[[Sizes], Sequence[float]]
    settings: Callable[[Sizes, str], Settings]
    called: Callable[[float], str]  # a size has one name, however it was written


class MethodConfig(Section, ABC):
    """A method with its settings, before it has a model: subclass it to bring a method of your own."""

    name: str
    needs_public: ClassVar[bool] = False  # it cannot do without public samples
    by_coordinate: ClassVar[bool] = False  # its mean can be a rule for every number: server.robust = "median"

    @abstractmethod
    def build(self, model: nn.Module, setup: Any) -> Any:
        """Return the running method, a `fedhm.Method`, for a model; `setup` is a `fedhm.methods.method.Setup`."""

    @property
    def unbounded(self) -> str:
        """Return why one client's change of the merged model has no bound, and what to set; empty if it has one.

        It has if the model moves by the mean of its clients' changes, in which every one counts the same: only then
        the server can hide one of them by noise (`[privacy]`).
        """
        return f"method.name = '{self.name}' does not move its model by a plain mean of changes: choose fedhm or fedavg"

    # What reports and comparisons ask

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        """Return what the method adds to the names that `fedhm compare --methods` takes."""
        name = cls.model_fields["name"].default
        return [NamedEntry(name, lambda _: {"name": name})]

    @property
    def shares(self) -> Sequence[float]:
        """Return the size of each capability level, where there are several: one listed twice has two shares."""
        return ()

    @property
    def rank_ratios(self) -> Sequence[float]:
        """Return the tiers that other methods' sizes are matched to, if this method is the one to match."""
        return ()

    @property
    def adapters(self) -> Settings:
        """Return the settings of adapters that other methods are compared with, if this method trains such."""
        return {}

    @property
    def column(self) -> str:
        """Return the column of a comparison that several one-size runs share; empty where each has its own."""
        return ""

    @property
    def is_full_model(self) -> bool:
        """Tell whether every client trains the whole model: costs are relative to that."""
        return False

    @property
    def remark(self) -> str:
        """Return what figures say of the method beside its name."""
        return ""

    def in_setting(self, heterogeneity: str) -> Settings:  # noqa: ARG002
        """Return the settings that the method's authors use with fixed or dynamic tiers."""
        return {}


def matched_widths(name: str) -> list[NamedEntry]:
    """Return the entry of a method whose tiers are widths: those that match FedHM's tiers."""
    return [NamedEntry(name, lambda sizes: {"name": name, "tiers": sizes.widths})]


PAPER_WIDTHS = (1.0, 0.62, 0.5, 0.35)  # sizes near those of γ = 1, 1/2, 1/4, 1/8 on ResNet-18


def replace_largest(levels: Sequence[Number], count: int, name: str) -> list[Number]:
    """Return the levels of which the `count` largest give way to the next smaller one, for the entry `name`."""
    if len(levels) <= count:
        raise FedhmError(f"{name} needs at least {count + 1} tiers, but there are {len(levels)}")
    return [levels[count]] * (count + 1) + list(levels[count + 1 :])


def only_uniform(weighting: str) -> str:
    """Return why a mean with this weighting has no bound for one client's change; empty if it has one."""
    return "" if weighting == "uniform" else f"method.weighting = '{weighting}' counts some clients more: set 'uniform'"

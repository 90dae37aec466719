"""The settings of a method, `MethodConfig`: what the rest of the library knows about any method.

A method is one file with a subclass:

    class MyMethod(MethodConfig):
        name: Literal["mine"] = "mine"
        share: float = 0.5                       # a setting: method.share in a config

        def build(self, model, setup):
            return Running(self, model, setup)   # a fedhm.Method
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from torch import nn

from fedhm.config.section import Section
from fedhm.errors import FedhmError

if TYPE_CHECKING:
    from fedhm.config.schema import Config

Settings = dict[str, Any]  # a [method] section
Number = TypeVar("Number", int, float)


class Sizes(Protocol):
    """FedHM's tiers in a comparison. The tiers of all other methods are matched to them."""

    @property
    def config(self) -> "Config":
        """Return the settings that all entries share, except for [method] and declared changes."""
        ...

    @property
    def fedhm(self) -> Settings: ...
    @property
    def adapters(self) -> Settings:
        """Return the settings of the config's adapters, if its method trains adapters."""
        ...

    @property
    def keep(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def ratios(self) -> list[float]:
        """Return the rank ratios, largest first; a ratio with two shares of the clients is listed twice."""
        ...

    @property
    def widths(self) -> list[float]:
        """Return widths with as many parameters as the ratios."""
        ...

    @property
    def bases(self) -> list[int]:
        """Return for each ratio how many networks of the smallest width have as many parameters."""
        ...


@dataclass(frozen=True)
class Change:
    """A setting outside [method] that an entry of a comparison declares to be its own.

    Other entries keep the config's value. Tables name the change, and the runs stay comparable in spite of it.
    """

    section: Literal["data", "model", "train", "evaluation"]
    key: str
    value: bool | int | float | str

    @property
    def name(self) -> str:
        """Return the dotted key, as --set would change it."""
        return f"{self.section}.{self.key}"

    def __str__(self) -> str:
        return f"{self.name} = {self.value if isinstance(self.value, str) else json.dumps(self.value)}"


def no_changes(_: Sizes) -> Sequence[Change]:
    return ()


@dataclass(frozen=True)
class NamedEntry:
    """A name in `fedhm compare --methods`: a method with its settings, run once for each seed."""

    name: str
    settings: Callable[[Sizes], Settings]
    changes: Callable[[Sizes], Sequence[Change]] = no_changes


@dataclass(frozen=True)
class Family:
    """A name for several entries, NAME:SIZE, one for each size below the full model."""

    name: str
    members: Callable[[Sizes], Sequence[float]]
    settings: Callable[[Sizes, str], Settings]
    called: Callable[[float], str]  # the name of a size, however it was written
    changes: Callable[[Sizes], Sequence[Change]] = no_changes


# The longest step, learning rate × gradient norm, of methods that train factorized layers: norm 2 at a rate of 0.1.
# docs/results.md says how it was chosen, and methods/fedhm.py why factors need it.
STABLE_STEP = 0.2


class MethodConfig(Section, ABC):
    """A method with its settings, before it has a model. Subclass it for a method of your own."""

    name: str
    needs_public: ClassVar[bool] = False  # it needs public samples
    server_trains: ClassVar[bool] = False  # its server trains networks while it merges
    weighs_clients: ClassVar[bool] = True  # its mean counts clients by `Update.weight` (federation.weights)
    by_coordinate: ClassVar[bool] = False  # its mean may be replaced by server.robust = "median"
    analysed: ClassVar[bool] = False  # evaluation.diagnostics = "theory" is about it

    @abstractmethod
    def build(self, model: nn.Module, setup: Any) -> Any:
        """Return the running method, a `fedhm.Method`, for a model; `setup` is a `fedhm.methods.method.Setup`."""

    @property
    def unbounded(self) -> str:
        """Return why one client's effect on the merged model has no bound, and what to set; empty if it has one.

        It has a bound if the model moves by the plain mean of its clients' changes. Only then can noise at the server
        hide one client (`[privacy]`).
        """
        return f"method.name = '{self.name}' does not move its model by a plain mean of changes: choose fedhm or fedavg"

    def clip_norm(self, lr: float) -> float:  # noqa: ARG002
        """Return the largest gradient norm at a learning rate, unless `train.clip_norm` states one; 0: no limit."""
        return 0.0

    # For reports and comparisons

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        """Return the method's names in `fedhm compare --methods`."""
        name = cls.model_fields["name"].default
        return [NamedEntry(name, lambda _: {"name": name})]

    @property
    def shares(self) -> Sequence[float]:
        """Return the size of each capability level, if there are several; one listed twice has two shares."""
        return ()

    @property
    def rank_ratios(self) -> Sequence[float]:
        """Return the tiers that other methods' sizes are matched to, if this method has such tiers."""
        return ()

    @property
    def adapters(self) -> Settings:
        """Return the settings of the adapters, if this method trains adapters."""
        return {}

    @property
    def column(self) -> str:
        """Return the column of a comparison that runs of one size share; empty if each has its own."""
        return ""

    @property
    def is_full_model(self) -> bool:
        """Tell whether every client trains the whole model; comparisons show costs relative to that."""
        return False

    @property
    def remark(self) -> str:
        """Return a remark for figures, beside the method's name."""
        return ""

    def in_setting(self, heterogeneity: str) -> Settings:  # noqa: ARG002
        """Return the settings that the method's authors use with fixed or dynamic tiers."""
        return {}


def matched_widths(name: str) -> list[NamedEntry]:
    """Return the entry of a method whose tiers are widths, matched to FedHM's tiers."""
    return [NamedEntry(name, lambda sizes: {"name": name, "tiers": sizes.widths})]


PAPER_WIDTHS = (1.0, 0.62, 0.5, 0.35)  # sizes near those of γ = 1, 1/2, 1/4, 1/8 on ResNet-18


def replace_largest(levels: Sequence[Number], count: int, name: str) -> list[Number]:
    """Return the levels with the `count` largest replaced by the next smaller one, for the entry `name`."""
    if len(levels) <= count:
        raise FedhmError(f"{name} needs at least {count + 1} tiers, but there are {len(levels)}")
    return [levels[count]] * (count + 1) + list(levels[count + 1 :])


def only_uniform(weighting: str) -> str:
    """Return why a mean with this weighting does not bound one client's effect; empty if it does."""
    return "" if weighting == "uniform" else f"method.weighting = '{weighting}' counts some clients more: set 'uniform'"

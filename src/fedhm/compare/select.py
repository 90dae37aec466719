"""The entries of a comparison: the methods that `--methods` names, with tiers of the same sizes as FedHM's."""

import difflib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self, TypeVar

from torch import Tensor, nn

from fedhm.assembly import Design, named_design
from fedhm.compare import METHODS
from fedhm.compare.results import EntryRuns
from fedhm.config import registry as plugins
from fedhm.config.method import Change, Family, NamedEntry, Settings
from fedhm.config.registry import make
from fedhm.config.schema import CompareConfig, Config
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import plan_ranks
from fedhm.measure.cost import LayerCost, cost_by_layer, sample_spec
from fedhm.models.own import load_function
from fedhm.widths.narrow import narrow_network
from fedhm.widths.plan import plan_widths

Number = TypeVar("Number", int, float)
WIDTHS = [hundredths / 100 for hundredths in range(1, 101)]
RATIOS = [parts / 64 for parts in range(1, 65)]  # all have a name that is a fraction


class Reference:
    """FedHM's tiers on the config's model: the `Sizes` that other methods match theirs to."""

    def __init__(self, config: Config, model: str = "") -> None:
        self._config, self._model = config, model
        self._given = config.compare or CompareConfig()
        self.rounds = config.train.rounds

    def with_rounds(self, rounds: int) -> Self:
        """Return the same sizes for runs of another length."""
        other = copy(self)
        other.rounds = rounds
        return other

    @property
    def config(self) -> Config:
        return self._config

    @property
    def model(self) -> str:
        """Return a user's own model, as --model names it."""
        return self._model

    @cached_property
    def fedhm(self) -> Settings:
        """Return FedHM's settings: the config's, or the defaults at the tiers that the config's method has."""
        default = make("methods", "fedhm")
        tiers = list(self._config.method.rank_ratios or default.rank_ratios)
        return self.given_settings(default.name) or {**default.model_dump(mode="json"), "tiers": tiers}

    @property
    def adapters(self) -> Settings:
        """Return the settings of the config's adapters, which all methods share."""
        return self._config.method.adapters

    @property
    def keep(self) -> int:
        kept: int = self.fedhm["keep"]
        return kept

    @cached_property
    def ratios(self) -> list[float]:
        """Return FedHM's tiers, largest first. A tier of two capability levels comes twice.

        A budget is replaced by the ratio with the same number of parameters as the network that the budget affords.
        """
        tiers: list[float | str] = self.fedhm["tiers"]
        named = any(isinstance(tier, str) for tier in tiers)  # budgets and shares: only the model tells their sizes
        sizes = self._sizes if named else [0] * len(tiers)
        both = zip(tiers, sizes, strict=True)
        return sorted((self._nearest_ratio(n) if isinstance(tier, str) else tier for tier, n in both), reverse=True)

    def given_settings(self, method: str) -> Settings | None:
        """Return the config's own [method] section if it is for this method."""
        own = self._config.method
        return own.model_dump(mode="json") if own.name == method else None

    @cached_property
    def widths(self) -> list[float]:
        """Return the widths for methods of widths: as given, or with as many parameters as FedHM's tiers."""
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
        method, (shape, _) = self._design.method, sample_spec(self._design.sample)
        networks = {"full": self._design.model} | {tier: method.network(method.spec(tier)) for tier in method.tiers}
        return {tier: cost_by_layer(network, shape) for tier, network in networks.items()}

    @cached_property
    def _design(self) -> Design:
        method = make("methods", "fedhm").model_validate(self.fedhm)
        own = load_function(self._model) if self._model else None
        return named_design(self._config.model_copy(update={"method": method}), own)

    @cached_property
    def _sizes(self) -> list[int]:
        """Return the number of parameters of each of FedHM's levels."""
        method = self._design.method
        sizes = {tier: _parameters(method.network(method.spec(tier))) for tier in method.tiers}
        return [sizes[tier] for tier in method.levels]

    def _narrow_size(self, width: float) -> int:
        model, sample, classifiers = self._design.model, self._design.sample, self._design.classifiers
        if not isinstance(sample, Tensor):
            raise FedhmError("methods of widths are for models whose input is one tensor: leave them out of --methods")
        return _parameters(narrow_network(model, plan_widths(model, width, sample, classifiers)))

    def _nearest_width(self, size: int) -> float:
        return _nearest(WIDTHS, self._narrow_size, size)

    def _ratio_size(self, ratio: float) -> int:
        model, classifiers = self._design.model, self._design.classifiers or "auto"
        fedhm = self.fedhm
        plan = plan_ranks(model, ratio, self.keep, classifier=classifiers, form=fedhm["form"], dense=fedhm["dense"])
        return _parameters(to_hybrid(model, plan, spectral=False))

    def _nearest_ratio(self, size: int) -> float:
        return _nearest(RATIOS, self._ratio_size, size)


def layer_costs(entries: Sequence[EntryRuns]) -> dict[str, dict[str, LayerCost]]:
    """Return the costs by tier and layer of the config's model; none if the model was passed in Python."""
    configs = [entry.first.config for entry in entries if entry.first.config.model and entry.first.config.data]
    configs.sort(
        key=lambda config: not config.method.rank_ratios
    )  # methods with rank ratios first: their tiers are shown
    return Reference(configs[0]).layers() if configs else {}


def _nearest(choices: Sequence[float], size_of: Callable[[float], int], size: int) -> float:
    """Return the choice whose number of parameters is nearest to `size`. Choices are in ascending order."""
    above = bisect_right(choices, size, key=size_of)  # the largest of equal ones
    return min(choices[max(0, above - 1) : above + 1], key=lambda choice: abs(size_of(choice) - size))


def _parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


# The names in `--methods`: each stands for one entry of a comparison, or for a family of entries.
#
# Every method adds its own names, also a method from another installed package.


@dataclass(frozen=True)
class Entry:
    """A method with its settings. It is run once for each seed."""

    label: str
    method: Settings
    changes: Settings = field(default_factory=dict)  # tuned settings by dotted key
    declared: tuple[Change, ...] = ()  # other settings outside [method] that are its own
    model: str = ""  # a user's own model, as --model names it; empty: the config's

    def is_same_run(self, other: "Entry") -> bool:
        """Tell whether two entries differ in nothing but their names."""
        own, others = ((e.method, e.changes, set(e.declared)) for e in (self, other))
        return own == others


def resolve_entries(names: Sequence[str], reference: Reference) -> list[Entry]:
    """Return the entries that `names` stand for, each once."""
    found: dict[str, Entry] = {}
    for name in names:
        for entry in _entries(name, reference):
            found.setdefault(entry.label, entry)
    if not found:
        raise FedhmError(f"there is no method to compare: known are {', '.join(known_names())}")
    return [replace(entry, model=reference.model) for entry in found.values()]


def default_names(reference: Reference) -> list[str]:
    """Return the default names, without a method that would have no clients."""
    return [name for name in METHODS.split(",") if name != "capable" or 1 in reference.ratios]


def drop_duplicates(found: Sequence[Entry]) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries without duplicates, and the name of the earlier entry for each duplicate.

    With the paper's own settings, `fedhm` is `fedhm-paper`: the same weights twice would only take twice the time.
    """
    first: list[Entry] = []
    duplicates: dict[str, str] = {}
    for entry in found:
        if same := next((earlier.label for earlier in first if earlier.is_same_run(entry)), None):
            duplicates[entry.label] = same
        else:
            first.append(entry)
    return first, duplicates


def known_names() -> list[str]:
    """Return all names: those of single entries first, then those of families."""
    provided = _provided()
    return sorted(provided, key=lambda name: isinstance(provided[name], Family))


def _provided() -> dict[str, NamedEntry | Family]:
    """Return the entries and families of all methods by name. If two use the same name, the first has it."""
    provided: dict[str, NamedEntry | Family] = {}
    for name in plugins.known("methods"):
        try:
            given = plugins.find("methods", name).entries()
        except Exception:  # an error of another package, raised again for users who name that method
            continue
        for entry in given:
            provided.setdefault(entry.name, entry)
    return provided


def _entries(name: str, reference: Reference) -> Iterator[Entry]:
    kind, colon, size = name.partition(":")
    provided = _provided()
    entry = provided.get(kind)
    if isinstance(entry, Family):
        sizes = [size] if colon else [f"{value:.12g}" for value in entry.members(reference) if value < 1]
        if not sizes:
            raise FedhmError(f"{kind} has nothing to train: there is no tier below the full model")
        declared = _declared(entry, reference)
        for value in sizes:
            label = f"{kind}:{_canonical_size(entry, value)}"
            yield Entry(label, entry.settings(reference, value), declared=declared)
    elif entry is None:
        raise FedhmError(f"--methods: {_unknown(kind, name)}")
    elif colon:
        families = [family for family in provided if isinstance(provided[family], Family)]
        listed = f"{', '.join(families[:-1])} and {families[-1]}"
        raise FedhmError(f"--methods {name}: only {listed} are followed by a colon and a size")
    else:
        settings = reference.given_settings(kind) or entry.settings(reference)
        yield Entry(kind, settings, declared=_declared(entry, reference))


def _declared(entry: NamedEntry | Family, reference: Reference) -> tuple[Change, ...]:
    """Return the changes that an entry declares, without those that the config makes for all entries."""
    shared = reference.config.dotted()
    return tuple(change for change in entry.changes(reference) if shared.get(change.name) != change.value)


def _unknown(kind: str, name: str) -> str:
    if kind in plugins.known("methods"):
        plugins.find("methods", kind).entries()  # raises its own error
    near = difflib.get_close_matches(kind, known_names(), n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"there is no '{name}', {hint}known are {', '.join(known_names())}"


def _canonical_size(family: Family, value: str) -> str:
    """Return the one name of a size, however it was written. Other texts are refused when settings are read."""
    try:
        numerator, _, denominator = value.partition("/")
        return family.called(float(numerator) / float(denominator or 1))
    except (ValueError, ZeroDivisionError, OverflowError):
        return value

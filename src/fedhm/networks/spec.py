"""Which network a task is about: a value that methods make, tasks carry, and methods build networks from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NetworkSpec:
    """One network of a method. Most methods have one network for each tier: `NetworkSpec(tier)`.

    A method reads the fields that it set itself; nobody parses `label`. Two specs that are equal mean the same network
    on every machine, so specs are keys of caches and travel as JSON.
    """

    tier: str  # the tier that the network belongs to
    label: str = ""  # how people and seeds call it; empty: as the tier
    variant: str = ""  # which version, where clients train another network than the one that is deployed: "scaled"
    number: int = 0  # which of several, or which rank, as the method counts them
    ranks: tuple[tuple[str, int], ...] = ()  # of the factorized layers, by layer name; all other layers are dense
    inside: tuple["NetworkSpec", ...] = ()  # smaller networks that are trained inside this one

    def __str__(self) -> str:
        """Return the name in messages and records. Seeds depend on it: another name gives other batches."""
        return self.label or self.tier

    def to_values(self) -> dict[str, Any]:
        """Return the spec as plain values, for JSON; fields at their defaults are left out."""
        values: dict[str, Any] = {"tier": self.tier}
        values |= {name: getattr(self, name) for name in ("label", "variant", "number") if getattr(self, name)}
        if self.ranks:
            values["ranks"] = dict(self.ranks)
        if self.inside:
            values["inside"] = [spec.to_values() for spec in self.inside]
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "NetworkSpec":
        """Return the spec that `to_values` has written."""
        plain = {name: values[name] for name in ("tier", "label", "variant", "number") if name in values}
        ranks = tuple((str(layer), int(rank)) for layer, rank in values.get("ranks", {}).items())
        return cls(**plain, ranks=ranks, inside=tuple(cls.from_values(inner) for inner in values.get("inside", ())))

"""The common part of methods that train adapters on a frozen base (`fedhm.adapters`): settings and first adapters."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from fedhm.adapters.adapted import AdapterSettings, FrozenBase, find_head
from fedhm.adapters.packing import FOLDED
from fedhm.config.method import MethodConfig, Settings
from fedhm.config.section import Positive, tier_name
from fedhm.errors import FedhmError
from fedhm.lowrank.average import initial_adapter
from fedhm.lowrank.svd import Factors, to_layer_factors
from fedhm.methods.method import Setup
from fedhm.networks.exchange import Tensors
from fedhm.seeds import torch_generator


def _listed(value: Any) -> Any:
    """Return names as a tuple: of a single name, or of [query, value] from a shell, which removes the quotes."""
    if not isinstance(value, str) or value == "auto":
        return value
    if value.startswith("[") and value.endswith("]"):
        return tuple(name for each in value[1:-1].split(",") if (name := each.strip().strip("\"'")))
    return (value,)


Names = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]
Ranks = Annotated[tuple[Positive, ...], Field(min_length=1)]


class AdapterConfig(MethodConfig):
    """The settings that all methods with adapters have."""

    by_coordinate: ClassVar[bool] = False
    target: Names = ("query", "value")  # the layers that get adapters, by the ends of their names
    scale: Annotated[float, Field(gt=0)] = 2.0  # LoRA's α/r, at every rank
    head: Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_listed)] = "auto"  # modules trained whole
    weighting: Literal["uniform", "samples"] = "uniform"

    def base(self, model: nn.Module, setup: Setup) -> FrozenBase:
        head = find_head(model, self.head, setup.classifier, setup.objective.per_token)
        return FrozenBase(model, AdapterSettings(self.target, self.scale, head))

    @property
    def adapters(self) -> Settings:
        head = self.head if isinstance(self.head, str) else list(self.head)
        return {"target": list(self.target), "scale": self.scale, "head": head, "weighting": self.weighting}


class RanksConfig(AdapterConfig):
    """The settings of methods in which each tier has a rank."""

    ranks: Ranks = (16, 8, 4, 2)  # of the tiers; one listed twice has two shares of the clients

    @property
    def shares(self) -> Sequence[float]:
        return [rank / max(self.ranks) for rank in self.ranks]

    @property
    def adapters(self) -> Settings:
        return {"ranks": list(self.ranks), **super().adapters}

    def levels(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """Return the tier of each level, largest first, and every tier's rank."""
        ordered = sorted(self.ranks, reverse=True)
        named = {tier_name(rank / ordered[0]): rank for rank in ordered}
        return tuple(tier_name(rank / ordered[0]) for rank in ordered), named


class RankConfig(AdapterConfig):
    """The settings of methods in which all clients have adapters of one rank."""

    rank: Positive = 2

    @property
    def adapters(self) -> Settings:
        return {"ranks": [self.rank], **super().adapters}

    @property
    def tier(self) -> str:
        return f"r{self.rank}"


def smallest_rank_settings(name: str, adapters: Settings) -> Settings:
    """Return a comparison's settings for a method of one rank: the smallest, which every client can afford."""
    return rank_settings(name, adapters, min(adapters.get("ranks", [2])))


def rank_settings(name: str, adapters: Settings, rank: int) -> Settings:
    """Return a comparison's settings for a method of one rank."""
    return {"name": name, "rank": rank, **{key: value for key, value in adapters.items() if key != "ranks"}}


def initial_adapters(base: FrozenBase, rank: int, seed: int, *when: int) -> dict[str, Factors]:
    """Return random first adapters, by layer, the same for all clients.

    when  the round, if adapters start again in each round, and the client, if each client has its own
    """
    return {
        layer: initial_adapter((shape[1], shape[0]), rank, torch_generator(seed, "adapters", layer, *when))
        for layer, shape in base.shapes.items()
    }


def adapter_tensors(factors: dict[str, Factors], rank: int, shapes: dict[str, Any]) -> Tensors:
    """Return the leading directions of all layers as tensors that travel: u (r, m) and v (n, r)."""
    found: dict[str, Tensor] = {}
    for layer, each in factors.items():
        found[f"{layer}.u"], found[f"{layer}.v"] = to_layer_factors(*each.prefix(rank), shapes[layer])
    return found


def check_travelling(travels: frozenset[str], weights: Tensors, tier: str) -> None:
    """Refuse a state that lacks a tensor that clients train: they would send it, and the server would lose it."""
    kept = {name for name in weights if not name.startswith(FOLDED)}
    if odd := sorted(kept ^ travels):
        whose = "the server has no value of it" if odd[0] in travels else "clients do not train it"
        raise FedhmError(
            f"what is trained in tier {tier} is not what the server averages: '{odd[0]}', of which {whose}"
        )

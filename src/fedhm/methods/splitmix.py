"""Split-Mix: independent narrow base networks; a client trains as many as it can afford, a tier is their ensemble.

tasks    a participant of tier j gets j bases: the next one of a cyclic shuffle, so that all are trained equally
         often, and j − 1 others drawn without replacement
merge    every base is averaged over the clients that trained it
tier j   the mean of the logits of the first j bases

A base's weights start like those of the full width, and its activations are divided by its width
(`widths/wrappers.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from fedhm.config.method import Family, MethodConfig, NamedEntry
from fedhm.config.section import Positive, Ratio
from fedhm.methods.means import WeightedMean, client_weight
from fedhm.methods.method import Method, Setup, State
from fedhm.methods.sliced import WidthSlices
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.networks.structure import copy_network, reinitialise
from fedhm.seeds import derive, numpy_generator
from fedhm.widths.wrappers import Ensemble
from fedhm.work.messages import Participant, Task, Update


class SplitMixConfig(MethodConfig):
    name: Literal["splitmix"] = "splitmix"
    weighting: Literal["uniform", "samples"] = "uniform"
    base: Ratio = 0.35  # the width of a base network
    tiers: Annotated[tuple[Positive, ...], Field(min_length=1)] = (9, 3, 2, 1)  # how many of them
    rescaled_init: bool = True  # weights start as small as those of the full width
    scaler: bool = True  # divide activations by the width, if no normalisation follows

    def build(self, model: nn.Module, setup: Setup) -> "SplitMix":
        return SplitMix(model, self, setup)

    @classmethod
    def entries(cls) -> Sequence[NamedEntry | Family]:
        return [
            NamedEntry("splitmix", lambda sizes: {"name": "splitmix", "base": min(sizes.widths), "tiers": sizes.bases})
        ]

    @property
    def shares(self) -> Sequence[float]:
        return self.tiers


@dataclass(frozen=True)
class SplitMixState(State):
    bases: tuple[Tensors, ...]
    averaged: ClassVar[tuple[str, ...]] = ("bases",)


class SplitMix(Method[SplitMixState]):
    state_type = SplitMixState

    def __init__(self, model: nn.Module, config: SplitMixConfig, setup: Setup) -> None:
        self.config, self._seed, self._classifiers = config, setup.seed, setup.output_layers
        self.slices = WidthSlices(model, (config.base,), setup, scaled_to=1.0 if config.scaler else None)
        self._width = self.slices.tiers[0]
        self.levels = tuple(f"{count}x{config.base:g}" for count in sorted(config.tiers, reverse=True))
        self.tiers = tuple(dict.fromkeys(self.levels))
        self._counts = dict(zip(self.levels, sorted(config.tiers, reverse=True), strict=True))
        self._bases = max(config.tiers)
        self._model = model

    def start(self, weights: Tensors) -> SplitMixState:
        """Return the bases: the first is the leading slice of the given weights, the others of new initialisations.

        Such slices start smaller than a narrow network's own initialisation, by √width, as Split-Mix does.
        """
        bases: list[Tensors] = []
        for base in range(self._bases):
            full = weights if base == 0 else self._new_weights(base)
            own = self.slices.slice_weights(full, self._width)
            bases.append(own if self.config.rescaled_init else self.slices.rescale_init(own, self._width))
        return SplitMixState(tuple(bases))

    def tasks(self, state: SplitMixState, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for place, p in enumerate(participants):
            for base in self._assigned(p, (round_number - 1) * len(participants) + place):
                spec = NetworkSpec(self._width, f"base {base}", "base", number=base)
                yield Task("train", round_number, p.client, p.tier, spec, state.bases[base])

    def merge(self, state: SplitMixState, updates: Iterable[Update], round_number: int) -> SplitMixState:
        means = [WeightedMean(base) for base in state.bases]
        for update in updates:
            means[update.network.number].add_all(
                update, client_weight(update, self.config.weighting), self._classifiers
            )
        return SplitMixState(tuple(mean.result() for mean in means))

    def network(self, spec: NetworkSpec) -> nn.Module:
        if spec.variant == "base":
            return self.slices.network(self.slices.trained_spec(self._width))
        return Ensemble(self.slices.network(NetworkSpec(self._width)) for _ in range(self._counts[spec.tier]))

    def weights(self, state: SplitMixState, tier: str) -> Tensors:
        bases = [self.slices.deployed_weights(base, self._width) for base in state.bases[: self._counts[tier]]]
        return {f"members.{place}.{name}": t for place, base in enumerate(bases) for name, t in base.items()}

    def _assigned(self, participant: Participant, turn: int) -> list[int]:
        """Return a participant's bases. `turn` counts participants over all rounds; each cycle of bases is shuffled."""
        cycle, place = divmod(turn, self._bases)
        first = int(numpy_generator(self._seed, "cycle", cycle).permutation(self._bases)[place])
        others = [base for base in range(self._bases) if base != first]
        draw = numpy_generator(self._seed, "bases", turn, participant.client)
        return [first, *draw.choice(others, self._counts[participant.tier] - 1, replace=False).tolist()]

    def _new_weights(self, base: int) -> Tensors:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self._seed, "base", base))
            return exchanged_tensors(reinitialise(copy_network(self._model)))


ENTRY_POINT = SplitMixConfig

"""Split-Mix: independent narrow base networks; a client trains as many as it can afford, a tier is their ensemble.

tasks    a participant of tier j gets j bases: the next one of a cyclic shuffle, so that all are trained equally
         often, and j − 1 others drawn without replacement
merge    every base is averaged over those who trained it
tier j   the mean of the logits of the first j bases
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from fedhm.config.method import SplitMixConfig
from fedhm.methods.mean import WeightedMean, influence
from fedhm.methods.method import Setup, State
from fedhm.methods.sliced import Slices
from fedhm.networks.copied import copied
from fedhm.networks.exchange import Tensors, exchanged
from fedhm.seeds import derive, numpy_generator
from fedhm.widths.ensemble import Ensemble
from fedhm.work.messages import Participant, Task, Update

BASE = "base"


class SplitMix:
    def __init__(self, model: nn.Module, config: SplitMixConfig, setup: Setup) -> None:
        self.config, self._seed, self._classifier = config, setup.seed, setup.classifier
        self.slices = Slices(model, (config.base,), setup)
        self.levels = tuple(f"{count}x{config.base:g}" for count in sorted(config.tiers, reverse=True))
        self.tiers = tuple(dict.fromkeys(self.levels))
        self._counts = dict(zip(self.levels, sorted(config.tiers, reverse=True), strict=True))
        self._bases = max(config.tiers)
        self._model = model

    def start(self, weights: Tensors) -> State:
        """The first base is the leading part of the given weights, the others of as many new initialisations.

        Slices of a wider network start smaller than a narrow network of its own would, by √width: its initialisation.
        """
        state: Tensors = {}
        for base in range(self._bases):
            full = weights if base == 0 else self._new_weights(base)
            own = self.slices.take(full, self.slices.tiers[0])
            own = own if self.config.rescaled_init else self.slices.own_scale(own, self.slices.tiers[0])
            state |= {f"{base}/{name}": tensor for name, tensor in own.items()}
        return State(state)

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        for place, p in enumerate(participants):
            for base in self._assigned(p, (round_number - 1) * len(participants) + place):
                yield Task("train", round_number, p.client, p.tier, f"{BASE} {base}", self._base(state, base))

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        mean = WeightedMean(state.weights)
        for update in updates:
            base = update.network.removeprefix(f"{BASE} ")
            mean.add_all(update, influence(update, self.config.weighting), self._classifier, prefix=f"{base}/")
        return State(mean.result())

    def network(self, name: str) -> nn.Module:
        if name.startswith(BASE):
            return self.slices.network(self.slices.tiers[0])
        return Ensemble(self.slices.network(self.slices.tiers[0]) for _ in range(self._counts[name]))

    def weights(self, state: State, tier: str) -> Tensors:
        bases = range(self._counts[tier])
        return {f"members.{base}.{name}": t for base in bases for name, t in self._base(state, base).items()}

    def _base(self, state: State, base: int) -> Tensors:
        prefix = f"{base}/"
        return {name.removeprefix(prefix): t for name, t in state.weights.items() if name.startswith(prefix)}

    def _assigned(self, participant: Participant, turn: int) -> list[int]:
        """Participants are counted through all rounds; every cycle of as many turns as there are bases is shuffled."""
        cycle, place = divmod(turn, self._bases)
        first = int(numpy_generator(self._seed, "cycle", cycle).permutation(self._bases)[place])
        others = [base for base in range(self._bases) if base != first]
        draw = numpy_generator(self._seed, "bases", turn, participant.client)
        return [first, *draw.choice(others, self._counts[participant.tier] - 1, replace=False).tolist()]

    def _new_weights(self, base: int) -> Tensors:
        model = copied(self._model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self._seed, "base", base))
            for layer in model.modules():
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        return exchanged(model)

"""FedDF: every tier has a model of its own; the server brings each towards what all clients' models say together.

merge    W_γ ← Σ αₚ Wₚ / Σ αₚ                      over the round's clients p of tier γ
         t ← mean over all p of f_p(x)             on the public inputs x
         W_γ ← Adam on KL(softmax(t) ‖ softmax(f_γ(x)))   over batches of x, for every tier γ

The published server stops early on a validation set and lowers its learning rate on the way; here it takes a given
number of steps at one rate.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat

import torch
from torch import Tensor, nn

from fedhm.config.method import FedDFConfig
from fedhm.methods.mean import WeightedMean, influence
from fedhm.methods.method import Setup, State
from fedhm.methods.sliced import Slices
from fedhm.networks.exchange import Tensors, exchanged, load
from fedhm.seeds import derive, torch_generator
from fedhm.work.distil import divergence, follow, scores
from fedhm.work.memory_format import channels_last
from fedhm.work.messages import Participant, Task, Update


class FedDF:
    def __init__(self, model: nn.Module, config: FedDFConfig, setup: Setup) -> None:
        self.config, self._public = config, setup.public
        self.slices = Slices(model, config.tiers, setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels
        self._classifier, self._seed = setup.classifier, setup.seed

    def start(self, weights: Tensors) -> State:
        state: Tensors = {}
        for tier in self.tiers:
            own = self.slices.own_scale(self.slices.take(weights, tier), tier)
            state |= {f"{tier}/{name}": tensor for name, tensor in own.items()}
        return State(state)

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        sent = {tier: self.weights(state, tier) for tier in {p.tier for p in participants}}
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, p.tier, sent[p.tier])

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        assert self._public is not None
        mean = WeightedMean(state.weights)
        teacher = torch.zeros(())  # the clients' logits on the public inputs, summed
        round_number = teachers = 0
        for update in updates:
            mean.add_all(update, influence(update, self.config.weighting), self._classifier, f"{update.tier}/")
            client = load(self.network(update.tier), update.tensors)
            teacher = teacher + scores(client, self._public, self.config.batch)
            round_number, teachers = update.round, teachers + 1
        weights = mean.result()
        if teachers:
            for tier in self.tiers:
                student = self._distilled(_of(tier, weights), teacher / teachers, tier, round_number)
                weights |= {f"{tier}/{name}": tensor for name, tensor in student.items()}
        return State(weights)

    def network(self, name: str) -> nn.Module:
        return self.slices.network(name)

    def weights(self, state: State, tier: str) -> Tensors:
        return _of(tier, state.weights)

    def _distilled(self, weights: Tensors, teacher: Tensor, tier: str, round_number: int) -> Tensors:
        assert self._public is not None
        student = channels_last(load(self.network(tier), weights))
        generator = torch_generator(self._seed, "distil", round_number, tier)
        epochs = (self._public.shuffled(self.config.batch, generator) for _ in repeat(None))
        optimizer = torch.optim.Adam(student.parameters(), lr=self.config.lr)
        with torch.random.fork_rng(devices=[]):  # dropout knows only the global generator
            torch.manual_seed(derive(self._seed, "dropout", round_number, tier))
            follow(student, teacher, divergence, optimizer, islice(chain.from_iterable(epochs), self.config.steps))
        return exchanged(student)


def _of(tier: str, weights: Tensors) -> Tensors:
    prefix = f"{tier}/"
    return {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}

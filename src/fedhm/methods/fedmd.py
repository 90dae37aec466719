"""FedMD: every client has a model of its own, which never travels; what travels are class scores on public inputs.

tasks    a participant gets the consensus of the last round. It digests it, bringing its model f_p towards it by SGD on
         mean |f_p(x) − consensus| over the public inputs x; revisits its own samples; and sends its scores f_p(x)
merge    consensus ← mean over the participants of f_p(x)

A tier is a width. Its model, for evaluation, is that of its client that took part last, the lowest number of several.
The server of a simulation keeps the clients' models for them, so its state grows with the number of clients.

In the published method all clients train on the labelled public samples before they begin; here public samples have
no labels, and a client begins with its own.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from fedhm.config.method import FedMDConfig
from fedhm.errors import FedhmError
from fedhm.methods.method import Setup, State
from fedhm.methods.sliced import Slices
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Participant, Task, Update

CONSENSUS = "consensus"
NOBODY = torch.tensor(-1)


class FedMD:
    def __init__(self, model: nn.Module, config: FedMDConfig, setup: Setup) -> None:
        if not setup.fixed:
            raise FedhmError(
                "in fedmd every client keeps a model of its own, of its tier's width: "
                "federation.heterogeneity must be 'fixed'"
            )
        self.config = config
        self.slices = Slices(model, config.tiers, setup)
        self.tiers, self.levels = self.slices.tiers, self.slices.levels

    def start(self, weights: Tensors) -> State:
        return State(weights)

    def tasks(self, state: State, participants: Sequence[Participant], round_number: int) -> Iterator[Task]:
        agreed = {CONSENSUS: state.memory[CONSENSUS]} if CONSENSUS in state.memory else {}
        options = {"digest_epochs": self.config.digest_epochs, "digest_lr": self.config.digest_lr}
        for p in participants:
            kept = self._model_of(p.client, state, p.tier)
            yield Task("distil", round_number, p.client, p.tier, p.tier, agreed, kept, options)

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """The initial weights stay in the state, for clients that are yet to take part."""
        memory = dict(state.memory)
        total, count = torch.zeros(()), 0
        newest: dict[str, int] = {}
        for update in updates:
            total, count = total + update.tensors["scores"], count + 1
            memory |= {f"client {update.client}/{name}": tensor for name, tensor in update.kept.items()}
            newest[update.tier] = min(update.client, newest.get(update.tier, update.client))
        memory |= {f"newest/{tier}": torch.tensor(client) for tier, client in newest.items()}
        return State(state.weights, {**memory, CONSENSUS: total / count} if count else memory)

    def network(self, name: str) -> nn.Module:
        return self.slices.network(name)

    def weights(self, state: State, tier: str) -> Tensors:
        return self._model_of(int(state.memory.get(f"newest/{tier}", NOBODY)), state, tier)

    def _model_of(self, client: int, state: State, tier: str) -> Tensors:
        """The model that a client kept; before it took part, the tier's initial one."""
        initial = self.slices.own_scale(self.slices.take(state.weights, tier), tier)
        return {name: state.memory.get(f"client {client}/{name}", tensor) for name, tensor in initial.items()}

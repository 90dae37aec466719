"""What a client does with a task: train, distil, gather BatchNorm statistics. Nothing else runs there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.batchnorm import gather
from fedhm.config import TrainConfig
from fedhm.data.batches import Feed, Preprocessing
from fedhm.data.samples import Samples
from fedhm.distil import absolute_error, follow, scores
from fedhm.exchange import exchanged, load
from fedhm.lowrank.decay import add_frobenius_decay
from fedhm.lowrank.layers import LowRank
from fedhm.memory_format import channels_last
from fedhm.messages import Task, Tensors, Update
from fedhm.seeds import derive, torch_generator


@dataclass(frozen=True)
class Client:
    """Holds one client's samples and knows how to build each network that a task may name."""

    samples: Samples
    preprocessing: Preprocessing
    network: Callable[[str], nn.Module]
    train: TrainConfig
    seed: int
    public: Feed | None = None  # samples that everybody has, numbered in place of labels

    def run(self, task: Task, position: int = 0) -> Update:
        weights = task.kept if task.kind == "distil" else task.tensors
        network = channels_last(load(self.network(task.network), weights))
        feed = Feed(self.samples, self.preprocessing)
        labels: tuple[int, ...] | None = None
        loss = 0.0
        kept: Tensors = {}
        if task.kind != "statistics":
            if self.train.masked_loss:
                labels = tuple(self.samples.labels.unique().tolist())
            # Dropout knows only the global generator: seed it for this task alone, and give it back as it was.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive(self.seed, "network", task.round, task.client, task.network))
                if task.kind == "distil":
                    self._digest(network, task)
                loss = self._fit(network, feed, labels, task)
            trained = exchanged(network)
            tensors: Tensors = {name: trained[name].contiguous() for name in weights}
            if task.kind == "distil":
                assert self.public is not None
                tensors, kept = {"scores": scores(network, self.public, self.train.batch)}, tensors
        else:
            # Nothing is kept for a backward pass, so four times the batch fits where training does.
            tensors = gather(network, (inputs for inputs, _ in feed.ordered(4 * self.train.batch)))
        return Update(
            task.kind, task.round, task.client, task.tier, task.network, tensors,
            len(self.samples), labels, loss, position, kept,
        )  # fmt: skip

    def _digest(self, network: nn.Module, task: Task) -> None:
        """Brings the network towards the scores that the clients agreed on, if they have yet, by plain SGD."""
        if "consensus" not in task.tensors:
            return
        assert self.public is not None
        generator = torch_generator(self.seed, "digest", task.round, task.client)
        optimizer = torch.optim.SGD(network.parameters(), lr=task.options["digest_lr"])
        for _ in range(int(task.options["digest_epochs"])):
            batches = self.public.shuffled(self.train.batch, generator)
            follow(network, task.tensors["consensus"], absolute_error, optimizer, batches)

    def _fit(self, network: nn.Module, feed: Feed, labels: tuple[int, ...] | None, task: Task) -> float:
        """SGD over the epochs of one round; the mean loss of the last epoch."""
        generator = torch_generator(self.seed, "batches", task.round, task.client, task.network)
        optimizer = self._optimizer(network, self.train.learning_rate(task.round))
        network.train()
        total = torch.zeros(())
        for _ in range(self.train.epochs):
            total = torch.zeros(())  # summed as a tensor: no step waits for its loss
            for inputs, targets in feed.shuffled(self.train.batch, generator):
                optimizer.zero_grad()
                loss = masked_cross_entropy(network(inputs), targets, labels)
                loss.backward()
                if self.train.frobenius_decay:
                    add_frobenius_decay(network, self.train.frobenius_decay)
                if self.train.clip_norm:
                    nn.utils.clip_grad_norm_(network.parameters(), self.train.clip_norm)
                optimizer.step()
                total += loss.detach() * len(targets)
        return total.item() / len(self.samples)

    def _optimizer(self, network: nn.Module, lr: float) -> torch.optim.Optimizer:
        factors = {id(p) for m in network.modules() if isinstance(m, LowRank) for p in (m.u, m.v)}
        trained = [p for p in network.parameters() if p.requires_grad]
        # Frobenius decay takes the place of weight decay on the factors
        undecayed = set() if self.train.decay_factors or not self.train.frobenius_decay else factors
        groups = [
            {
                "params": [p for p in trained if id(p) not in undecayed],
                "weight_decay": self.train.weight_decay,
            },
            {"params": [p for p in trained if id(p) in undecayed], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.SGD(groups, lr=lr, momentum=self.train.momentum)


def masked_cross_entropy(logits: Tensor, targets: Tensor, labels: tuple[int, ...] | None) -> Tensor:
    """Cross-entropy in which the logits of labels that the client does not hold are 0, so that they learn nothing."""
    if labels is not None and len(labels) < logits.shape[1]:
        held = torch.zeros(logits.shape[1], dtype=torch.bool)
        held[list(labels)] = True
        logits = logits.masked_fill(~held, 0.0)
    return F.cross_entropy(logits, targets)

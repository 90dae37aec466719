"""What a client does with a task: train, distil, gather BatchNorm statistics. Nothing else runs there."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.config.settings import TrainConfig
from fedhm.data.batches import Feed, Preprocessing
from fedhm.data.samples import Samples
from fedhm.lowrank.decay import add_decay, factorized_layers
from fedhm.lowrank.layers import LowRank
from fedhm.machine.device import seeded
from fedhm.networks.batchnorm import gather
from fedhm.networks.exchange import Tensors
from fedhm.seeds import derive, torch_generator
from fedhm.work.distil import absolute_error, follow, scores
from fedhm.work.messages import Task, Update
from fedhm.work.reuse import Networks, Ready


@dataclass(frozen=True)
class Client:
    """Holds one client's samples and has the networks that a task may name."""

    samples: Samples
    preprocessing: Preprocessing
    networks: Networks
    train: TrainConfig
    seed: int
    public: Feed | None = None  # samples that everybody has, numbered in place of labels

    def run(self, task: Task, position: int = 0) -> Update:
        weights = task.kept if task.kind == "distil" else task.tensors
        with self.networks.loaded(task.network, weights) as ready:
            return self._answer(ready, task, weights, position)

    def _answer(self, ready: Ready, task: Task, weights: Tensors, position: int) -> Update:
        network, device = ready.network, self.networks.device
        feed = Feed(self.samples, self.preprocessing, device)
        labels: tuple[int, ...] | None = None
        loss = 0.0
        kept: Tensors = {}
        if task.kind != "statistics":
            if self.train.masked_loss:
                labels = tuple(self.samples.labels.unique().tolist())
            with seeded(derive(self.seed, "network", task.round, task.client, task.network), device):
                if task.kind == "distil":
                    self._digest(network, task)
                loss = self._fit(ready, feed, labels, task)
            if task.kind == "distil":
                assert self.public is not None
                tensors = {"scores": scores(network, self.public.on(device), self.train.batch).cpu()}
                kept = ready.surrender(weights)
            else:
                tensors = ready.surrender(weights)
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
        consensus = task.tensors["consensus"].to(self.networks.device)
        for _ in range(int(task.options["digest_epochs"])):
            batches = self.public.on(self.networks.device).shuffled(self.train.batch, generator)
            follow(network, consensus, absolute_error, optimizer, batches)

    def _fit(self, ready: Ready, feed: Feed, labels: tuple[int, ...] | None, task: Task) -> float:
        """SGD over the epochs of one round; the mean loss of the last epoch."""
        generator = torch_generator(self.seed, "batches", task.round, task.client, task.network)
        network, forward = ready.network, ready.forward
        layers = factorized_layers(network) if self.train.frobenius_decay else []
        optimizer = self._optimizer(network, self.train.learning_rate(task.round))
        network.train()
        total = torch.zeros(())
        for _ in range(self.train.epochs):
            total = torch.zeros((), device=feed.device)  # summed as a tensor: no step waits for its loss
            for inputs, targets in feed.shuffled(self.train.batch, generator):
                optimizer.zero_grad()
                loss = masked_cross_entropy(forward(inputs), targets, labels)
                loss.backward()
                add_decay(layers, self.train.frobenius_decay)
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
        # where there is one operation for each tensor, there is nothing to fuse, and it is faster without
        fusible = self.train.momentum > 0 or self.train.weight_decay > 0
        fused = fusible and all(p.is_floating_point() for p in trained) and not _has_sparse_gradients(network)
        return torch.optim.SGD(groups, lr=lr, momentum=self.train.momentum, fused=fused or None)


def masked_cross_entropy(logits: Tensor, targets: Tensor, labels: tuple[int, ...] | None) -> Tensor:
    """Cross-entropy in which the logits of labels that the client does not hold are 0, so that they learn nothing."""
    if labels is not None and len(labels) < logits.shape[1]:
        logits = logits.masked_fill(_missing(labels, logits.shape[1], logits.device), 0.0)
    return F.cross_entropy(logits, targets)


@lru_cache(maxsize=1)  # a client asks with every batch
def _missing(labels: tuple[int, ...], classes: int, device: torch.device) -> Tensor:
    missing = torch.ones(classes, dtype=torch.bool)
    missing[list(labels)] = False
    return missing.to(device)


def _has_sparse_gradients(network: nn.Module) -> bool:
    return any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse for layer in network.modules())

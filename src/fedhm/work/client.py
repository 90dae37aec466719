"""A client: its samples, and the networks on which it does tasks. Nothing else runs there."""

from dataclasses import dataclass, field
from functools import partial

from torch import nn

from fedhm.config.plugins import find, make
from fedhm.config.sections.objective import Objective
from fedhm.config.sections.training import TrainConfig
from fedhm.data.batches import Feed, Preprocessing
from fedhm.data.samples import Samples
from fedhm.networks.batchnorm import running_names
from fedhm.networks.exchange import untrained
from fedhm.networks.reuse import Networks
from fedhm.work.local_noise import LocalNoise
from fedhm.work.messages import Failure, Reply, Task, Update


@dataclass(frozen=True)
class Client:
    """One client's samples, and the networks that a task may name."""

    samples: Samples
    preprocessing: Preprocessing
    networks: Networks
    train: TrainConfig
    seed: int
    public: Feed | None = None  # samples that everybody has, numbered in place of labels
    objective: Objective = field(default_factory=partial(make, "objectives", "classification"))
    tests: Samples | None = None  # held out of its training; None, or of length 0: it has none
    noise: LocalNoise | None = None  # that it adds to what it sends; None: it trusts its server

    @property
    def feed(self) -> Feed:
        return Feed(self.samples, self.preprocessing, self.networks.device)

    @property
    def held(self) -> tuple[int, ...] | None:
        """Return the labels that the client holds, where its loss is masked to them."""
        masked = self.train.masked_loss and self.objective.has_labels
        return self.objective.held(self.samples.labels) if masked else None

    def reply(self, task: Task, position: int = 0) -> Reply:
        """Do a task, or say why it cannot be done."""
        try:
            return self.run(task, position)
        except (RuntimeError, ValueError) as error:  # torch's way to say that network and data do not go together
            return Failure(task.client, str(error), position, error)
        except IndexError as error:  # of a table that the network looks its inputs up in
            reason = f"its samples do not fit the network, which has no such number in a table ({error})"
            return Failure(task.client, reason, position, error)

    def run(self, task: Task, position: int = 0) -> Update:
        """Do a task by its kind of work."""
        work = find("work", task.kind)
        used = (self.tests or ()) if work.tests else self.samples
        if not len(used):
            raise ValueError("it has no test samples")
        if self.noise and not work.returns_network:
            raise ValueError("it sends only networks that it has added noise to (privacy.where = 'client')")
        with self.networks.loaded(task.network, work.loaded(task)) as ready:
            alone = self._left_alone(ready.network) if self.noise else frozenset()
            answer = work.run(self, task, ready)
        update = Update(
            task.kind, task.round, task.client, task.tier, task.network, answer.tensors,
            len(used), answer.labels, answer.loss, position, answer.kept,
        )  # fmt: skip
        return self.noise.hidden(update, task, work.loaded(task), alone) if self.noise else update

    def _left_alone(self, network: nn.Module) -> frozenset[str]:
        """Return what travels of a network, but follows neither from training nor from the client's samples."""
        return untrained(network) - (set() if self.train.frozen_statistics else running_names(network))

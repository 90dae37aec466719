"""A client: its samples, the networks on which it does tasks, and the noise that it adds to its updates.

Nothing else runs at a client.
"""

import hashlib
import secrets
from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedhm.config.objective import Objective
from fedhm.config.registry import find, make
from fedhm.config.schema import ClientRuntime, PrivacyConfig, TrainConfig
from fedhm.data.lazy import UnreadableSampleError
from fedhm.data.samples import Feed, Preprocessing, SampleCache, Samples
from fedhm.lowrank.delta import clip_delta
from fedhm.machine.device import CPU
from fedhm.machine.memory import DEVICE_ADVICE, EVALUATION_ADVICE, TRAINING_ADVICE, memory_errors
from fedhm.machine.tensors import update_digest
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import Tensors, untrained_names
from fedhm.networks.reuse import NetworkPool
from fedhm.seeds import Secret, secret_normals
from fedhm.work.messages import Failure, Reply, Task, Update

if TYPE_CHECKING:
    from fedhm.work.work import Work


@dataclass(frozen=True)
class LocalNoise:
    """Noise that a client adds to its updates, if it does not trust the server (`privacy.where = 'client'`).

    The change of all tensors together is clipped to norm C, and every number of it gets noise of N(0, (z C)²). Tensors
    are clipped as they travel: for a factorized layer, these are the factors and not their product.

    Without a secret, the noise comes from the operating system.
    """

    privacy: PrivacyConfig
    secret: Secret

    def apply(self, update: Update, task: Task, sent: Tensors, untrained: Set[str]) -> Update:
        """Return the update with noise. Untrained tensors go back as they came, and the loss is not revealed."""
        if update.kept or update.labels is not None:
            what = "tensors that it keeps" if update.kept else "the labels that it holds (train.masked_loss)"
            raise ValueError(f"it would send {what} without noise (privacy.where = 'client')")
        trained = {name: sent[name] if name in untrained else tensor for name, tensor in update.tensors.items()}
        clipped = clip_delta(trained, sent, (), self.privacy.clip)
        secret = self.secret.value or secrets.token_bytes(32)
        # The digest makes sure that no other update of this client in this round is hidden by the same numbers.
        purpose = ("client", task.round, task.client, str(task.network), _digest(clipped))
        noisy = {n: t if n in untrained else self._noisy(n, t, secret, purpose) for n, t in clipped.items()}
        return replace(update, tensors=noisy, loss=0.0)

    def _noisy(self, name: str, tensor: Tensor, secret: bytes, purpose: tuple[int | str, ...]) -> Tensor:
        real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
        drawn = secret_normals(secret, real.numel(), *purpose, name).view(real.shape)
        noisy = real + self.privacy.noise * self.privacy.clip * drawn
        if name.endswith("running_var"):
            noisy.clamp_(min=0.0)
        return (torch.view_as_complex(noisy) if tensor.is_complex() else noisy).to(tensor.dtype)


def _digest(tensors: Tensors) -> str:
    digest = hashlib.blake2b()
    for name in sorted(tensors):
        update_digest(digest, tensors[name])
    return digest.hexdigest()


@dataclass(frozen=True)
class Client:
    """One client's samples and settings, and the networks that a task may name."""

    samples: Samples
    preprocessing: Preprocessing
    networks: NetworkPool
    train: TrainConfig
    seed: int
    public: Feed | None = None  # samples that all clients have, with their numbers in place of labels
    objective: Objective = field(default_factory=partial(make, "objectives", "classification"))
    tests: Samples | None = None  # held out of its training; None or empty: it has none
    noise: LocalNoise | None = None  # None: it trusts its server
    cache: SampleCache | None = None  # samples of all clients that stay on the device; None: none do
    runtime: ClientRuntime = "torch"  # what makes its local steps

    @property
    def feed(self) -> Feed:
        return Feed(self.samples, self.preprocessing, self.networks.device, self.cache)

    @property
    def test_feed(self) -> Feed:
        assert self.tests is not None
        return Feed(self.tests, self.preprocessing, self.networks.device, self.cache)

    def use_device(self, device: torch.device) -> None:
        """Do tasks on another device from now on, before the first one."""
        self.networks.device = device
        if self.cache is not None:
            self.cache.device = device

    @property
    def loss_labels(self) -> tuple[int, ...] | None:
        """Return the labels that the client holds, if its loss is masked to them; otherwise None."""
        masked = self.train.masked_loss and self.objective.has_labels
        return self.objective.held(self.samples.labels) if masked else None

    def reply(self, task: Task, position: int = 0) -> Reply:
        """Do a task, and return its update or the reason why it failed.

        Too little memory is no fault of the client where its tasks run in the server's machine. So it is raised.
        """
        try:
            return self.run(task, position)
        except (RuntimeError, ValueError) as error:  # torch raises these if network and data do not fit
            return Failure(task.client, str(error), position, error)
        except IndexError as error:  # an input has no row in an embedding table
            reason = f"its samples do not fit the network, which has no such number in a table ({error})"
            return Failure(task.client, reason, position, error)
        except UnreadableSampleError as error:
            return Failure(task.client, str(error), position, error)

    def run(self, task: Task, position: int = 0) -> Update:
        """Do a task by its kind of work."""
        work = find("work", task.kind)
        device, whose = self.networks.device, f"for client {task.client} (tier {task.tier}) in round {task.round}"
        advice = TRAINING_ADVICE if work.trains else EVALUATION_ADVICE
        if device != CPU:
            whose, advice = f"on {device} {whose}", advice + DEVICE_ADVICE
        with memory_errors(whose, advice):
            return self._run(task, work, position)

    def _run(self, task: Task, work: "Work", position: int) -> Update:
        used = (self.tests or ()) if work.tests else self.samples
        if not len(used):
            raise ValueError("it has no test samples")
        if self.noise and not work.returns_network:
            raise ValueError("it sends only networks that it has added noise to (privacy.where = 'client')")
        with self.networks.loaded(task.network, work.loaded(task)) as ready:
            untrained = self._untrained(ready.network) if self.noise else frozenset()
            result = work.run(self, task, ready)
        update = Update(
            task.kind, task.round, task.client, task.tier, task.network, result.tensors,
            len(used), result.labels, result.loss, position, result.kept, measured=result.measured,
        )  # fmt: skip
        return self.noise.apply(update, task, work.loaded(task), untrained) if self.noise else update

    def _untrained(self, network: nn.Module) -> frozenset[str]:
        """Return the names of tensors that depend neither on training nor on the client's samples."""
        return untrained_names(network) - (set() if self.train.frozen_statistics else running_statistic_names(network))

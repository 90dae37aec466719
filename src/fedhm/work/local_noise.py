"""Noise that a client adds itself to what it sends, where it does not trust its server.

Of all that travels, the change is cut as a whole to norm C, and every number of it gets noise of N(0, (z C)²). The
tensors are bounded as they travel: of factorized layers the factors, not their product.
"""

import hashlib
import secrets
from collections.abc import Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhm.config.sections.privacy import PrivacyConfig
from fedhm.lowrank.changes.change import within
from fedhm.networks.exchange import Tensors
from fedhm.seeds import Secret, secret_normals
from fedhm.work.messages import Task, Update


@dataclass(frozen=True)
class LocalNoise:
    """What a client does to an update before it leaves; without a secret, noise is the operating system's."""

    privacy: PrivacyConfig
    secret: Secret

    def hidden(self, update: Update, task: Task, sent: Tensors, untrained: Set[str]) -> Update:
        """Return the update as it may be sent; what is not trained goes back as it came, and no loss is told."""
        if update.kept or update.labels is not None:
            what = "tensors that it keeps" if update.kept else "the labels that it holds (train.masked_loss)"
            raise ValueError(f"it would send {what} without noise (privacy.where = 'client')")
        held = {name: sent[name] if name in untrained else tensor for name, tensor in update.tensors.items()}
        cut = within(held, sent, (), self.privacy.clip)
        secret = self.secret.value or secrets.token_bytes(32)
        # other updates of this client in this round, if there are such, must not be hidden by the same numbers
        purpose = ("client", task.round, task.client, task.network, _digest(cut))
        noisy = {n: t if n in untrained else self._noisy(n, t, secret, purpose) for n, t in cut.items()}
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
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

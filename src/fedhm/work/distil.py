"""Distillation: a network learns the scores that others give to inputs without labels.

On the public inputs xᵢ, with targets tᵢ of shape (classes,), a student f is brought to minimise

    mean |f(xᵢ) − tᵢ|                            absolute error, by FedMD's clients
    mean KL(softmax(tᵢ) ‖ softmax(f(xᵢ)))        divergence, by FedDF's server
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.data.batches import Batch, Feed
from fedhm.networks.batchnorm import by_batch
from fedhm.networks.exchange import Tensors

Loss = Callable[[Tensor, Tensor], Tensor]


def absolute_error(student: Tensor, teacher: Tensor) -> Tensor:
    return F.l1_loss(student, teacher)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)


def follow(
    network: nn.Module, targets: Tensor, loss: Loss, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]
) -> None:
    """One step on each batch of public inputs, which come with the numbers of their rows in `targets`."""
    network.train()
    with by_batch(network):
        for inputs, rows in batches:
            optimizer.zero_grad()
            loss(network(inputs), targets[rows]).backward()
            optimizer.step()


@torch.no_grad()
def scores(network: nn.Module, public: Feed, batch: int) -> Tensor:
    """The logits (N, classes) of all public inputs.

    Only BatchNorm looks at its batch, as in training: its running averages need not have travelled with the network.
    """
    network.eval()
    with by_batch(network):
        return torch.cat([network(inputs) for inputs, _ in public.ordered(batch)])


@torch.no_grad()
def blank_scores(network: nn.Module, sample: Tensor, count: int) -> Tensors:
    """What a client sends of `network` when it has distilled: names, shapes and types. `sample` is a batch of one."""
    logits: Tensor = network.eval()(sample)
    return {"scores": logits.new_zeros(count, logits.shape[1])}

"""Train an adapter whose last directions are kept small, and give these up if they have become smaller (HetLoRA).

With A (r, m), B (n, r) of a layer and s directions that would be left, what is minimised is

    loss + λ Σ_layers ‖A_{s:}‖ ‖B_{:, s:}‖

If that sum of products is smaller after training than it was before, the directions come back as zeros.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedhm.adapters.packing import adapter_factors
from fedhm.networks.inputs import Inputs, forward_batch
from fedhm.networks.reuse import PreparedNetwork
from fedhm.work.client import Client
from fedhm.work.messages import Task
from fedhm.work.train import fit, task_seed
from fedhm.work.work import TrainingWork, WorkResult


class Prune(TrainingWork):
    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        left, held = task.options.kept_rank, client.loss_labels
        before = _tails(ready.network, left).detach()

        def loss(inputs: Inputs, targets: Tensor) -> Tensor:
            own = client.objective.loss(forward_batch(ready.forward, inputs), targets, held)
            return own + task.options.penalty * _tails(ready.network, left)

        with task_seed(client, task):
            found = fit(client, task, ready, held, lambda: loss)
        with torch.no_grad():
            if bool(_tails(ready.network, left) < before):
                for a, b in _last(ready.network, left):
                    a.zero_(), b.zero_()
        return WorkResult(ready.hand_over(task.tensors), found, held)


def _last(network: nn.Module, left: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the last rows of A and columns of B of all layers."""
    for a, b in adapter_factors(network):
        yield a[left:], b[:, left:]


def _tails(network: nn.Module, left: int) -> Tensor:
    # at 0 a norm has no slope, and what begins as LoRA does is 0 there
    parts = [_norm(a) * _norm(b) for a, b in _last(network, left)]
    return torch.stack(parts).sum()


def _norm(tensor: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(tensor)
    return found


ENTRY_POINT = Prune()

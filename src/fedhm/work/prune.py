"""Train an adapter with a penalty on its last directions, and prune these if they became smaller (HetLoRA).

With A (r, m) and B (n, r) of a layer, and s the rank after pruning, training minimises

    loss + λ Σ_layers ‖A_{s:}‖ ‖B_{:, s:}‖

If that sum of products is smaller after training than before, the last directions come back as zeros.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedhm.adapters.packing import adapter_factors
from fedhm.networks.inputs import Inputs, forward_batch
from fedhm.networks.precision import MixedPrecision
from fedhm.networks.reuse import PreparedNetwork
from fedhm.networks.saving import Loss
from fedhm.work.client import Client
from fedhm.work.messages import Task
from fedhm.work.train import fit, task_seed
from fedhm.work.work import TrainingWork, WorkResult


class Prune(TrainingWork):
    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        kept, labels = task.options.kept_rank, client.loss_labels
        before = _tail_norms(ready.network, kept).detach()

        def next_loss(precision: MixedPrecision) -> Loss:
            forward = precision.forward(ready.forward)

            def loss(inputs: Inputs, targets: Tensor) -> Tensor:
                own = client.objective.loss(forward_batch(forward, inputs), targets, labels)
                return own + task.options.penalty * _tail_norms(ready.network, kept)

            return loss

        with task_seed(client, task):
            found = fit(client, task, ready, labels, next_loss)
        with torch.no_grad():
            if bool(_tail_norms(ready.network, kept) < before):
                for a, b in _last_directions(ready.network, kept):
                    a.zero_(), b.zero_()
        return WorkResult(ready.hand_over(task.tensors), found, labels)


def _last_directions(network: nn.Module, kept: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the last rows of A and columns of B of all layers."""
    for a, b in adapter_factors(network):
        yield a[kept:], b[:, kept:]


def _tail_norms(network: nn.Module, kept: int) -> Tensor:
    """Return the sum over all layers of ‖A_{s:}‖ ‖B_{:, s:}‖."""
    # `vector_norm` has gradient 0 at 0, where a norm has no slope. LoRA's B starts at 0.
    parts = [_norm(a) * _norm(b) for a, b in _last_directions(network, kept)]
    return torch.stack(parts).sum()


def _norm(tensor: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(tensor)
    return found


ENTRY_POINT = Prune()

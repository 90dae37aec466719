"""Compute the gradient of the client's loss at the network that was sent, on a fixed part of the client's samples.

The convergence bound is about ‖∇g(ĥ)‖² for g the mean over clients of g_p. A client estimates ∇g_p on samples that are
chosen once, from the seed and its number: the first `batch` of a permutation. They run in batches as in training, with
the same augmentation in every round. With G_i the gradients of k whole batches and Ḡ their mean, the client also sends

    variance = Σ ‖G_i − Ḡ‖² / (k − 1)

which estimates E‖∇G − ∇g_p‖² without bias, if batches are independent. There is none with fewer than two whole batches.

Layers are in evaluation mode; BatchNorm normalises by batch, as in training.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Batch, Feed
from fedhm.networks.batchnorm import freeze_statistics, normalise_by_batch
from fedhm.networks.exchange import Tensors, upcast_half
from fedhm.networks.inputs import Inputs, forward_batch
from fedhm.networks.reuse import PreparedNetwork
from fedhm.networks.saving import backward_in_parts
from fedhm.seeds import torch_generator
from fedhm.work.client import Client
from fedhm.work.measures import squared_norm
from fedhm.work.messages import Task, Update
from fedhm.work.train import task_train_config
from fedhm.work.work import LARGEST_MEAN, Example, Expected, WorkResult, validate_bounds

GRADIENT = "gradient"  # the kind of work, and before a parameter's name: its gradient
BATCHES, VARIANCE = "batches", "variance"  # k and the variance, which is 0 for k < 2


class Gradient:
    trains = returns_network = tests = False
    past, short = "computed gradients", "grad"

    def loaded(self, task: Task) -> Tensors:
        return task.tensors

    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        train, network, labels = task_train_config(client.train, task), ready.network, client.loss_labels
        generator = torch_generator(client.seed, "gradient", task.client)
        chosen = torch.randperm(len(client.samples), generator=generator)[: task.options.batch]
        feed = Feed(client.samples.subset(chosen), client.preprocessing, client.networks.device)
        batches = list(feed.shuffled(train.batch, generator))
        whole = [batch for batch in batches if len(batch[1]) == train.batch]
        trained = trained_parameters(network)
        total = {name: torch.zeros_like(upcast_half(p.detach())) for name, p in trained.items()}
        losses: list[Tensor] = []

        def loss_of(inputs: Inputs, targets: Tensor) -> Tensor:
            return client.objective.loss(forward_batch(network, inputs), targets, labels)

        def add(batch: Batch) -> Tensor:
            """Add a batch's gradient to the total, and return its squared norm."""
            network.zero_grad()
            size, parameters = len(batch[1]), list(trained.values())
            losses.append(upcast_half(backward_in_parts(loss_of, *batch, train.micro_batch, parameters)) * size)
            gradients = {name: _dense(p.grad) for name, p in trained.items() if p.grad is not None}
            for name, gradient in gradients.items():
                total[name] += gradient * size
            return squared_norm(list(gradients.values()))

        network.eval()
        if train.frozen_statistics:
            freeze_statistics(network)
        with nullcontext() if train.frozen_statistics else normalise_by_batch(network):
            squares = sum(add(batch).item() for batch in whole)
            variance = 0.0
            if len(whole) > 1:
                mean = squared_norm(list(total.values())).item() / (len(whole) * train.batch) ** 2
                variance = max(0.0, squares - len(whole) * mean) / (len(whole) - 1)
            for batch in batches:
                if len(batch[1]) != train.batch:
                    add(batch)
        sent = {f"{GRADIENT} {name}": (t / len(chosen)).cpu().contiguous() for name, t in total.items()}
        sent[BATCHES], sent[VARIANCE] = (torch.tensor(n, dtype=torch.float64) for n in (float(len(whole)), variance))
        return WorkResult(sent, torch.stack(losses).sum().item() / len(chosen))

    def expected(self, network: nn.Module, example: Example) -> Tensors:
        gradients = {
            f"{GRADIENT} {n}": torch.zeros_like(upcast_half(p)) for n, p in trained_parameters(network).items()
        }
        return gradients | {name: torch.zeros((), dtype=torch.float64) for name in (BATCHES, VARIANCE)}

    def validate(self, update: Update, task: Task, expected: Expected) -> str | None:
        bounds = {BATCHES: (0.0, float(task.options.batch)), VARIANCE: (0.0, LARGEST_MEAN**2)}
        for name, tensor in update.tensors.items():
            if reason := validate_bounds(name, tensor, *bounds.get(name, (-LARGEST_MEAN, LARGEST_MEAN))):
                return reason
        return None

    def samples_seen(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        return min(samples, task.options.batch)


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def _dense(gradient: Tensor) -> Tensor:
    return upcast_half(gradient.to_dense() if gradient.is_sparse else gradient)


ENTRY_POINT = Gradient()

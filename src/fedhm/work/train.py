"""Train the network on the client's samples and send it back: the local steps, their optimizer, and saving memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from warnings import warn

import torch
from torch import Tensor, nn

from fedhm.adapters.packing import head_parameter_ids
from fedhm.config.schema import Config, TrainConfig
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.lowrank.decay import add_frobenius_decay, low_rank_layers
from fedhm.lowrank.layers import LowRank
from fedhm.machine.device import seeded
from fedhm.machine.process import return_freed_memory
from fedhm.networks.batchnorm import freeze_statistics, running_statistic_names
from fedhm.networks.exchange import upcast_half
from fedhm.networks.inputs import Inputs, forward_batch
from fedhm.networks.precision import MixedPrecision
from fedhm.networks.reuse import PreparedNetwork
from fedhm.networks.saving import (
    Loss,
    backward_in_parts,
    check_blocks,
    check_repeatable,
    checkpoint_blocks,
    count_batches,
)
from fedhm.networks.sgd import SGD, Optimizer, ParameterGroup, step_unless
from fedhm.networks.structure import networks_in_training
from fedhm.seeds import derive, torch_generator
from fedhm.work.client import Client
from fedhm.work.measures import StepMeasures, measures_for
from fedhm.work.messages import Task
from fedhm.work.work import TrainingWork, WorkResult, steps_in_round


class Train(TrainingWork):
    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        measures = measures_for(task, ready.network)
        with task_seed(client, task):
            labels = client.loss_labels
            if client.runtime == "executorch":
                from fedhm.work.runtime import fit_in_runtime  # it imports torch.export, which takes long

                loss = fit_in_runtime(client, task, ready, labels)
            else:
                loss = fit(client, task, ready, labels, measures=measures)
        measured = measures.result() if measures else None  # before the tensors are handed over
        return WorkResult(ready.hand_over(task.tensors), loss, labels, measured=measured)


def task_seed(client: Client, task: Task) -> AbstractContextManager[None]:
    """Seed the global generators for one task: dropout and the like know no others."""
    return seeded(derive(client.seed, "network", task.round, task.client, str(task.network)), client.networks.device)


def fit(
    client: Client,
    task: Task,
    ready: PreparedNetwork,
    labels: tuple[int, ...] | None,
    next_loss: Callable[[MixedPrecision], Loss] | None = None,
    measures: StepMeasures | None = None,
) -> float:
    """Make the local steps of one round, and return the mean loss of the last epoch, or of all steps if they are fewer.

    labels     the labels to which the loss is masked; None: it is not masked
    next_loss  returns the loss for the next batch, in the given precision; None: the objective's loss
    measures   what is measured at every step; None: nothing
    """
    if client.runtime != "torch":
        raise FedhmError(f"engine.client = '{client.runtime}' cannot do '{task.kind}', only 'train' and 'nested'")
    train, feed = task_train_config(client.train, task), client.feed
    generator = torch_generator(client.seed, "batches", task.round, task.client, str(task.network))
    precision = MixedPrecision(train.precision, feed.device)
    network, forward = ready.network, precision.forward(ready.forward)
    layers = low_rank_layers(network) if train.frobenius_decay else []
    optimizer = local_optimizer(network, train, train.learning_rate(task.round))
    trained = [p for p in network.parameters() if p.requires_grad]
    prepare(network, train)

    def own_loss(inputs: Inputs, targets: Tensor) -> Tensor:
        return client.objective.loss(forward_batch(forward, inputs), targets, labels)

    samples = len(client.samples)
    steps = steps_in_round(train, samples)
    last_epoch = steps - count_batches(samples, train.batch)
    total, seen = torch.zeros((), device=feed.device), 0  # a tensor, so that no step waits for its loss
    for step, (inputs, targets) in enumerate(feed.shuffled(train.batch, generator, steps)):
        optimizer.zero_grad()
        loss_of = next_loss(precision) if next_loss else own_loss
        loss = backward_in_parts(loss_of, inputs, targets, train.micro_batch, trained, precision.backward)
        overflow = precision.unscale(trained)
        if measures:
            measures.add_step()
        add_frobenius_decay(layers, train.frobenius_decay)
        if train.gradient_limit:
            nn.utils.clip_grad_norm_(network.parameters(), train.gradient_limit)
        step_unless(optimizer, overflow)
        if step >= last_epoch:
            total += upcast_half(loss) * len(targets)
            seen += len(targets)
    return total.item() / seen


def task_train_config(train: TrainConfig, task: Task) -> TrainConfig:
    """Return the training settings of a task. The task of a tier with a budget of memory has its own."""
    if task.options.micro_batch is None:
        return train
    saving = {"micro_batch": task.options.micro_batch, "checkpointing": bool(task.options.checkpointing)}
    return train.model_copy(update=saving)


def inference_batch(most: int, train: TrainConfig, task: Task) -> int:
    """Return how many samples go forward together: `most`, or at most as many as in training if that saves memory."""
    train = task_train_config(train, task)
    return min(most, train.parts or train.batch) if train.parts or train.checkpointing else most


def prepare(network: nn.Module, train: TrainConfig) -> None:
    """Prepare a network, and the networks inside it, for training. It is thrown away afterwards."""
    if train.checkpointing or train.micro_batch:  # otherwise the process would keep the memory that is saved
        return_freed_memory()
    network.train()
    running = [each for each, _ in networks_in_training(network)]
    if train.frozen_statistics:
        for each in {network, *running}:
            freeze_statistics(each)
    checkpoint_blocks(running, train.checkpointing)


def local_optimizer(network: nn.Module, train: TrainConfig, lr: float) -> Optimizer:
    """Return an optimizer for a network's parameters."""
    factors = {id(p) for m in network.modules() if isinstance(m, LowRank) for p in (m.u, m.v)}
    trained = [p for p in network.parameters() if p.requires_grad]
    # Frobenius decay replaces weight decay on the factors
    undecayed = set() if train.decay_factors or not train.frobenius_decay else factors
    head = head_parameter_ids(network) if train.head_factor != 1 else frozenset()
    groups = [
        ParameterGroup([p for p in trained if id(p) not in undecayed | head], train.weight_decay),
        ParameterGroup([p for p in trained if id(p) in undecayed - head]),
        ParameterGroup([p for p in trained if id(p) in head], train.weight_decay, train.head_factor),
    ]
    groups = [group for group in groups if group.parameters]
    dense = all(p.is_floating_point() for p in trained) and not _has_sparse_gradients(network)
    wide = all(p.element_size() > 2 for p in trained)
    if train.optimizer == "adamw":
        listed = [
            {"params": group.parameters, "weight_decay": group.weight_decay, "lr": lr * group.lr_factor}
            for group in groups
        ]
        return torch.optim.AdamW(listed, lr, train.betas, train.eps, amsgrad=train.amsgrad, fused=dense or None)
    # On CPUs, torch's fused SGD does not change most 16-bit numbers. Without momentum and decay there is one operation
    # for each tensor: there is nothing to fuse, and plain SGD is faster.
    # Only a fused step can be left out on the device, which float16 needs.
    fused = dense and wide and (train.momentum > 0 or train.weight_decay > 0 or train.precision == "fp16")
    return SGD(groups, lr, train.momentum, train.dampening, train.nesterov, fused or None)


def check_optimizer(model: nn.Module, train: TrainConfig) -> None:
    """Refuse settings that torch's optimizers cannot handle with a model's number format."""
    half = any(p.dtype == torch.float16 for p in model.parameters())
    if half and train.optimizer == "adamw" and not torch.tensor(train.eps, dtype=torch.float16):
        raise FedhmError(
            f"train.eps = {train.eps:g} is 0 in the model's float16, and AdamW divides by it: set it to 1e-4"
        )


def check_memory_savings(model: nn.Module, config: Config, sample: Inputs) -> None:
    """Refuse ways of saving memory that a model does not allow, and warn of ways that change its training.

    sample  a batch of one input
    """
    train = config.train
    check_blocks(model, train.checkpointing)
    check_repeatable(model, train.checkpointing, sample)
    if train.checkpointing and config.engine.compile:
        raise FedhmError("train.checkpointing and engine.compile do not go together: set one of them to false")
    if config.objective.per_token and 0 < train.micro_batch < train.batch:
        raise FedhmError(
            f"train.micro_batch counts all samples of a batch alike, {config.objective.name} all tokens: set it to 0"
        )
    if train.frozen_statistics and not running_statistic_names(model):
        raise FedhmError("train.frozen_statistics = true, but the model has no BatchNorm layer that stores statistics")
    if 0 < train.micro_batch < train.batch and running_statistic_names(model) and not train.frozen_statistics:
        warn(
            f"with train.micro_batch = {train.micro_batch}, BatchNorm layers normalise by the statistics of so many "
            f"samples, not of train.batch = {train.batch}: training is not the same as without. With "
            "train.frozen_statistics = true, for models that come trained, it is",
            FedhmWarning,
            stacklevel=2,
        )


def _has_sparse_gradients(network: nn.Module) -> bool:
    return any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse for layer in network.modules())


ENTRY_POINT = Train()

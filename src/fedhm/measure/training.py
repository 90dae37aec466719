"""What training takes by a run's settings."""

import torch
from torch import nn

from fedhm.config.sections.training import TrainConfig
from fedhm.measure.cost import Form, training_memory


def memory_of_training(
    network: nn.Module, input_shape: Form, train: TrainConfig, dtype: torch.dtype | None = None
) -> int:
    """Measure the most bytes of tensors alive at once in a step of training as `[train]` has it."""
    return training_memory(
        network,
        input_shape,
        train.batch,
        dtype,
        optimizer=train.optimizer,
        micro_batch=train.micro_batch,
        checkpointing=train.checkpointing,
    )

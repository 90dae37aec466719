"""Which ways to train with less memory a run may take, before it begins."""

from warnings import warn

from torch import nn

from fedhm.config.settings import Config
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.networks.batchnorm import running_names
from fedhm.networks.checkpointing import check_blocks


def check_memory_savings(model: nn.Module, config: Config) -> None:
    """Refuse what cannot be done to a model, and warn of what is not the same."""
    train = config.train
    check_blocks(model, train.checkpointing)
    if train.checkpointing and config.engine.compile:
        raise FedhmError("train.checkpointing and engine.compile do not go together: set one of them to false")
    if train.frozen_statistics and not running_names(model):
        raise FedhmError("train.frozen_statistics = true, but the model has no BatchNorm layer that stores statistics")
    if 0 < train.micro_batch < train.batch and running_names(model) and not train.frozen_statistics:
        warn(
            f"with train.micro_batch = {train.micro_batch}, BatchNorm layers normalise by the statistics of so many "
            f"samples, not of train.batch = {train.batch}: training is not the same as without. With "
            "train.frozen_statistics = true, for models that come trained, it is",
            FedhmWarning,
            stacklevel=2,
        )

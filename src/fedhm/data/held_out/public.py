"""Public data: unlabelled inputs that the server and every client have, for methods that distil."""

import torch

from fedhm.config.settings import DataConfig
from fedhm.data.downscale import downscaled
from fedhm.data.samples import Samples
from fedhm.data.sources.catalogue import lies_in, read_source
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator

HELD_OUT = "held-out"


def set_aside(train: Samples, config: DataConfig, seed: int) -> tuple[Samples, Samples | None]:
    """Return what the clients may share of `train`, and the public samples that `config` asks for, in random order."""
    if not config.public:
        return train, None
    held_out = config.public == HELD_OUT
    supply = train if held_out else _read(config)
    wanted = config.public_samples
    if wanted > len(supply):
        name = config.source if held_out else config.public
        raise FedhmError(f"data.public_samples is {wanted}, but {name} has {len(supply)} samples for training")
    order = torch.from_numpy(numpy_generator(seed, "public").permutation(len(supply)))
    left = train.subset(order[wanted:].sort().values) if held_out else train
    return left, supply.subset(order[:wanted])


def _read(config: DataConfig) -> Samples:
    """Read the public data set from the source's folder, if its files are in there too, or from its default places."""
    there = config.public == config.source or lies_in(config.public, config.folder)
    train = read_source(config.public, config.folder if there else None).train
    return downscaled(train, config.downscale)

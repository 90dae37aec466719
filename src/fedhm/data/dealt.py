"""The data set that a config names, dealt out to clients."""

from typing import Any

import numpy as np
import torch

from fedhm.config.settings import DataConfig
from fedhm.data.batches import Preprocessing
from fedhm.data.downscale import downscaled_source
from fedhm.data.federation import Federation
from fedhm.data.held_out.client_tests import held_out
from fedhm.data.held_out.public import set_aside
from fedhm.data.held_out.validation import hold_out
from fedhm.data.partition import PARTITIONS
from fedhm.data.samples import Samples
from fedhm.data.sources.catalogue import read_source
from fedhm.data.sources.text import TEXT, read_text
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator


def partitioned(config: DataConfig, clients: int, seed: int, base: str = "", per_token: bool = False) -> Federation:
    """Read the data set that `config` names and deal it out to clients.

    base       of text: the pretrained model whose tokenizer reads it
    per_token  of text: every token is to be predicted
    """
    if config.source.startswith(TEXT):
        read = read_text(config.source.removeprefix(TEXT), config.folder, base, config.max_length, per_token)
    else:
        read = read_source(config.source, config.folder)
    source = downscaled_source(read, config.downscale)
    left, public = set_aside(source.train, config, seed)
    train = _chosen(left, config.train_samples, config.source, seed)
    if clients > len(train):
        raise FedhmError(f"{clients} clients cannot share {len(train)} samples: at least one each is needed")
    if train.labels.is_floating_point() and config.partition != "iid":
        raise FedhmError(f"data.partition = '{config.partition}' deals out labels, of which {config.source} has none")
    labels: np.ndarray[Any, np.dtype[np.int64]] = train.labels.numpy()
    rng = numpy_generator(seed, "partition")
    parts = PARTITIONS[config.partition](labels, clients, config, rng)
    dealt, test = [train.subset(torch.from_numpy(part)) for part in parts], source.test if config.test else None
    own, tests = held_out(dealt, config.client_test, seed)
    if config.validation:
        own, test = hold_out(own, config.validation, seed)
    return Federation(
        own,
        test,
        source.classes,
        Preprocessing(source.mean, source.std, config.crop, config.flip),
        public,
        tests=tests,
    )


def _chosen(samples: Samples, count: int, source: str, seed: int) -> Samples:
    if count > len(samples):
        raise FedhmError(f"data.train_samples = {count}, but {source} has {len(samples)} to train on")
    if not count:
        return samples
    chosen = numpy_generator(seed, "train samples").choice(len(samples), count, replace=False)
    return samples.subset(torch.from_numpy(np.sort(chosen)))

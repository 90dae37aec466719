"""The identity of a run: a digest of its settings, its data and its initial model."""

import hashlib
from dataclasses import dataclass

from torch import Tensor

from fedhm.config.schema import Config
from fedhm.data.federation import Federation
from fedhm.data.samples import Samples
from fedhm.machine.tensors import update_digest
from fedhm.networks.exchange import Tensors


def fingerprint(config: Config, weights: Tensors, federation: Federation) -> str:
    """Return a digest of settings, initial weights and data. Checkpoints carry it: another run does not resume them.

    The number of samples of remote clients does not count: they may have more by the time the run is resumed.
    """
    digest = hashlib.sha256(f"{config.without_location().to_toml()}{federation.preprocessing}".encode())
    for name in sorted(weights):
        _add(digest, name, weights[name])
    _add_data(digest, federation)
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class DataFacts:
    """A summary of a federation's data, for comparisons of runs."""

    classes: int
    input_shape: tuple[int, ...]
    clients: int
    samples: int  # of all clients
    digest: str  # of all samples that are here, and of the preprocessing


def data_facts(federation: Federation) -> DataFacts:
    digest = hashlib.sha256(str(federation.preprocessing).encode())
    _add_data(digest, federation)
    samples = sum(federation.samples_of(client) for client in range(federation.size))
    return DataFacts(
        classes=federation.classes,
        input_shape=federation.input_shape,
        clients=federation.size,
        samples=samples,
        digest=digest.hexdigest()[:32],
    )


def _add_data(digest: "hashlib._Hash", federation: Federation) -> None:
    test = [] if federation.test is None else [federation.test]
    for samples in [*federation.clients, *test, *federation.client_tests.samples]:
        _add_inputs(digest, "inputs", samples)
        _add(digest, "labels", samples.labels)
    if federation.client_tests.share:
        digest.update(f"client_test {federation.client_tests.share}".encode())
    if federation.public is not None:
        _add_inputs(digest, "public", federation.public)


def _add_inputs(digest: "hashlib._Hash", name: str, samples: Samples) -> None:
    if isinstance(samples.inputs, Tensor):
        _add(digest, name, samples.inputs)
    else:
        samples.inputs.update_digest(digest)


def _add(digest: "hashlib._Hash", name: str, tensor: Tensor) -> None:
    update_digest(digest, tensor, f"{name}{tuple(tensor.shape)}{tensor.dtype}")

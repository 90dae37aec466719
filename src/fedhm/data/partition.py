"""Who holds which samples: partitions of a labelled data set over clients.

Every function gives one index array per client; together they are a disjoint cover of the samples.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Partition = list[Indices]


def iid(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Partition:  # noqa: ARG001
    """Deal out equal random shares."""
    return [np.sort(share) for share in np.array_split(rng.permutation(len(labels)), clients)]


def dirichlet_equal(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Partition:
    """Deal out labels by shares drawn from Dirichlet(α) for each client, and the same number of samples to all.

    Each client asks for labels at random by its shares; a label that more samples are asked of than are left
    is dealt out among those who ask at random, and the others ask again among the labels that are left.
    """
    classes = int(labels.max()) + 1
    supply = [rng.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    left = np.array([len(s) for s in supply])
    shares = rng.dirichlet(np.full(classes, alpha), size=clients)
    wanted = np.array([len(part) for part in np.array_split(labels, clients)])
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    while wanted.any():
        asked = np.zeros((clients, classes), dtype=np.int64)
        for client in np.flatnonzero(wanted):
            weights = shares[client] * (left > 0)
            # A share can underflow to zero for every label that is left; then all of them are equally likely.
            weights = weights if weights.sum() > 0 else (left > 0).astype(float)
            asked[client] = rng.multinomial(wanted[client], weights / weights.sum())
        for label in np.flatnonzero(asked.sum(0)):
            asking = rng.permutation(np.repeat(np.arange(clients), asked[:, label]))[: left[label]]
            granted = np.bincount(asking, minlength=clients)
            start = len(supply[label]) - left[label]
            ends = start + np.cumsum(granted)
            for client in np.flatnonzero(granted):
                parts[client].append(supply[label][ends[client] - granted[client] : ends[client]])
            left[label] -= len(asking)
            wanted -= granted
    return [np.sort(np.concatenate([np.zeros(0, np.int64), *part])) for part in parts]


def dirichlet(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Partition:
    """Split each label over the clients by shares from Dirichlet(α): sizes differ, a client may end up with none."""
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(int(labels.max()) + 1):
        indices = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(indices)).astype(np.int64)
        for client, share in enumerate(np.split(indices, cuts)):
            parts[client].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]


PARTITIONS: dict[str, Callable[[Indices, int, float, np.random.Generator], Partition]] = {
    "iid": iid,
    "dirichlet": dirichlet_equal,
    "dirichlet-unequal": dirichlet,
}

"""Partitions of a labelled data set over clients.

Every function returns one index array a client. No sample is in two of them. Together they cover all samples, except
for `dirichlet_feddf`, which leaves out the few samples that do not divide by the number of clients.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedhm.config.schema import DataConfig, fixed_level
from fedhm.errors import FedhmError

Indices = NDArray[np.int64]
Partition = list[Indices]


def iid(labels: Indices, clients: int, rng: np.random.Generator) -> Partition:
    """Give every client an equal random share."""
    return [np.sort(share) for share in np.array_split(rng.permutation(len(labels)), clients)]


def dirichlet_equal(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Partition:
    """Give all clients the same number of samples, with label shares drawn from Dirichlet(α) for each client.

    Each client requests labels at random by its shares. If a label has too few samples left, random requests for it are
    granted, and the other clients request again among the labels that are left.
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
            # Shares may underflow to zero for all labels that are left; then all of them are equally likely.
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
    """Split each label over the clients by shares from Dirichlet(α): sizes differ, and a client may have no samples."""
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(int(labels.max()) + 1):
        indices = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(indices)).astype(np.int64)
        for client, share in enumerate(np.split(indices, cuts)):
            parts[client].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]


FEDDF_GROUP = 10  # clients that share a part of the samples
FEDDF_ATTEMPTS = 1000  # at a group, before its settings are refused: usual settings need a few


def dirichlet_feddf(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Partition:
    """Partition as the sampler of FedDF does, which FedHM's published code uses (Lin et al. 2020).

    Clients form groups of ten, the last of which may be smaller. A group shares a random part of the samples, in
    proportion to its size, and splits every label over its clients by shares from Dirichlet(α) (`_feddf_group`).

    Then the samples of all clients, one client after the other, are cut anew into pieces of equal sizes. So a client
    may get some samples that were drawn for its neighbours. The samples after the last piece, fewer than there are
    clients, are left out.
    """
    sizes = [min(FEDDF_GROUP, clients - first) for first in range(0, clients, FEDDF_GROUP)]
    ends = (np.cumsum(sizes)[:-1] * len(labels)) // clients
    groups = zip(np.split(rng.permutation(len(labels)), ends), sizes, strict=True)
    lined_up = np.concatenate(
        [part for group, size in groups for part in _feddf_group(labels, group, size, alpha, rng)]
    )
    each = len(labels) // clients
    return [np.sort(lined_up[client * each : (client + 1) * each]) for client in range(clients)]


def _feddf_group(labels: Indices, group: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Partition:
    """Split the samples of a group, label by label. A client with its equal share of them gets no further label.

    The whole split is drawn again until every client has half of an equal share.
    """
    share = len(group) / clients
    for _ in range(FEDDF_ATTEMPTS):
        parts = [group[:0]] * clients
        for label in np.unique(labels[group]):
            indices = group[labels[group] == label]
            open_clients = np.array([len(part) < share for part in parts])
            weights = rng.dirichlet(np.full(clients, alpha)) * open_clients
            # Shares may underflow to zero for all clients that still take samples; then these are equally likely.
            weights = weights if weights.sum() > 0 else open_clients.astype(float)
            cuts = np.cumsum(weights / weights.sum())[:-1] * len(indices)
            pieces = np.split(indices, cuts.astype(np.int64))
            parts = [np.concatenate([part, piece]) for part, piece in zip(parts, pieces, strict=True)]
        if min(map(len, parts)) >= int(share / 2):
            return parts
    raise FedhmError(
        f"data.partition = 'dirichlet-feddf' gives every client half of an equal share, and found no such split with "
        f"data.alpha = {alpha:g} in {FEDDF_ATTEMPTS} attempts: choose a larger alpha, or partition = 'dirichlet'"
    )


def by_tier(labels: Indices, clients: int, levels: int, share: float, rng: np.random.Generator) -> Partition:
    """Give all clients the same number of samples, and each capability level labels of its own.

    The clients of a level divide a `share` of the samples of its labels, until these are that share of a client's
    samples. The remaining samples of all labels are distributed at random.
    """
    classes = int(labels.max()) + 1
    if classes < levels:
        raise FedhmError(f"data.by_tier_levels = {levels}, but {classes} labels are too few for so many levels")
    sizes = np.array([len(part) for part in np.array_split(labels, clients)])
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    shared: list[Indices] = []
    for level, own_labels in enumerate(np.array_split(rng.permutation(classes), levels)):
        reserved: list[Indices] = []
        for label in own_labels:
            indices = rng.permutation(np.flatnonzero(labels == label))
            reserved.append(indices[: round(share * len(indices))])
            shared.append(indices[len(reserved[-1]) :])
        own = [client for client in range(clients) if fixed_level(client, levels) == level]
        supply = rng.permutation(np.concatenate(reserved))
        wanted = np.cumsum(np.rint(share * sizes[own]).astype(np.int64))
        # if a level's labels are too few, each of its clients gets proportionally fewer
        enough = min(1.0, len(supply) / wanted[-1]) if wanted.any() else 0.0
        *pieces, surplus = np.split(supply, (wanted * enough).astype(np.int64))
        shared.append(surplus)
        for client, piece in zip(own, pieces, strict=True):
            parts[client].append(piece)
    missing = sizes - np.array([sum(map(len, part)) for part in parts])
    rest = np.split(rng.permutation(np.concatenate(shared)), np.cumsum(missing)[:-1])
    return [np.sort(np.concatenate([*part, more])) for part, more in zip(parts, rest, strict=True)]


PARTITIONS: dict[str, Callable[[Indices, int, DataConfig, np.random.Generator], Partition]] = {
    "iid": lambda labels, clients, _, rng: iid(labels, clients, rng),
    "dirichlet": lambda labels, clients, config, rng: dirichlet_equal(labels, clients, config.alpha, rng),
    "dirichlet-unequal": lambda labels, clients, config, rng: dirichlet(labels, clients, config.alpha, rng),
    "dirichlet-feddf": lambda labels, clients, config, rng: dirichlet_feddf(labels, clients, config.alpha, rng),
    "by-tier": lambda labels, clients, config, rng: by_tier(
        labels, clients, config.by_tier_levels, config.by_tier_share, rng
    ),
}

"""Test samples of the clients' own: held out of what each trains on, or brought along."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedhm.config.objective import Objective
from fedhm.config.registry import make
from fedhm.config.schema import CLIENT_TEST, DataConfig
from fedhm.data.convert import DataLike, PublicLike, to_public_samples, to_samples
from fedhm.data.images import downscale, downscale_source
from fedhm.data.partition import PARTITIONS
from fedhm.data.samples import Feed, Preprocessing, Samples, channel_statistics, concatenate
from fedhm.data.sources import TEXT, is_in_folder, read_source, read_text
from fedhm.data.text import TextReader
from fedhm.data.tokens import Tokens
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator


@dataclass(frozen=True)
class ClientTests:
    """What clients test on: samples that are here, or what is known of those that lie elsewhere."""

    samples: Sequence[Samples] = ()  # one for each client, perhaps of length 0; empty: no client tests
    remote: tuple[int, ...] = ()  # in their place: how many each remote client says it has
    share: float = 0.0  # remote clients that bring no test samples hold out this share of their others

    def count(self, client: int) -> int:
        """Return how many a client has; 0 if it has none, or has not said yet."""
        if self.remote:
            return self.remote[client]
        return len(self.samples[client]) if self.samples else 0

    def of(self, client: int) -> Samples | None:
        """Return a client's test samples, if they are here."""
        return self.samples[client] if self.samples else None

    def named(self) -> list[tuple[str, Samples]]:
        """Return those that are here, without the empty ones, each with what a sentence calls it."""
        return [(f"the test set of client {n}", samples) for n, samples in enumerate(self.samples) if len(samples)]

    def holders(self, sizes: Sequence[int]) -> list[int]:
        """Return the clients that have test samples, or may have some since they have not said anything yet.

        sizes  how many other samples each client has; 0: it has not said yet
        """
        if not self.share and not any(self.count(client) for client in range(len(sizes))):
            return []
        return [client for client, size in enumerate(sizes) if self.count(client) or not size]


def hold_out_client_tests(clients: Sequence[Samples], share: float, seed: int) -> tuple[list[Samples], ClientTests]:
    """Return what clients train on, and what they test on."""
    if not share:
        return list(clients), ClientTests()
    pairs = [split_client_test(samples, share, seed, client) for client, samples in enumerate(clients)]
    return [left for left, _ in pairs], ClientTests([tests for _, tests in pairs])


def split_client_test(samples: Samples, share: float, seed: int, client: int) -> tuple[Samples, Samples]:
    """Return what a client trains on, and what it tests on, chosen at random.

    Who has two samples or more gives at least one, and keeps at least one.
    """
    count = max(0, min(max(1, round(share * len(samples))), len(samples) - 1))
    order = torch.from_numpy(numpy_generator(seed, "client test", client).permutation(len(samples)))
    return samples.subset(order[count:].sort().values), samples.subset(order[:count].sort().values)


def client_tests_from(
    clients: Sequence[Samples], given: float | Sequence[Any], seed: int, read: Callable[[Any, str], Samples]
) -> tuple[list[Samples], ClientTests]:
    """Return what clients train on, and what they test on, from a share or from a user's own test set for each.

    read  makes samples of what a user hands in for the client that a sentence is about
    """
    if isinstance(given, float | int):
        return hold_out_client_tests(clients, check_test_share(given), seed)
    if len(given) != len(clients):
        raise FedhmError(f"client_test has {len(given)} test sets for {len(clients)} clients: each needs one, or None")
    nothing = torch.arange(0)
    tests = [
        samples.subset(nothing) if data is None else read(data, f"the test set of client {client}")
        for client, (samples, data) in enumerate(zip(clients, given, strict=True))
    ]
    return list(clients), ClientTests(tests if any(len(samples) for samples in tests) else ())


def default_test_share(test: bool) -> float:
    """Return the share that clients hold out if nothing is said of it; `test`: the server has a test set."""
    return 0.0 if test else CLIENT_TEST


def check_test_share(given: Any) -> float:
    """Return the share that a user gave to be held out, or refuse it."""
    if isinstance(given, bool) or not isinstance(given, float | int) or not 0 <= given < 1:
        raise FedhmError(f"client_test must be a share of every client's samples, from 0 to below 1, not {given!r}")
    return float(given)


# Validation data: samples held out of what the clients train on, to choose settings by without the test set.


def hold_out_validation(clients: Sequence[Samples], share: float, seed: int) -> tuple[list[Samples], Samples]:
    """Return what is left to each client, and the samples that are held out of all of them, chosen at random.

    Shares are rounded over the clients together, so that many small ones do not all round to nothing; each keeps at
    least one sample.
    """
    left: list[Samples] = []
    held: list[Samples] = []
    seen = taken = 0
    for number, samples in enumerate(clients):
        seen += len(samples)
        count = max(0, min(round(share * seen) - taken, len(samples) - 1))
        taken += count
        order = torch.from_numpy(numpy_generator(seed, "validation", number).permutation(len(samples)))
        held.append(samples.subset(order[:count].sort().values))
        left.append(samples.subset(order[count:].sort().values))
    if not taken:
        raise FedhmError(f"data.validation = {share:g} holds nothing out of {seen} samples: choose a larger share")
    return left, concatenate(held)


# Public data: unlabelled inputs that the server and every client have, for methods that distil.

HELD_OUT = "held-out"


def hold_out_public(train: Samples, config: DataConfig, seed: int) -> tuple[Samples, Samples | None]:
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
    there = config.public == config.source or is_in_folder(config.public, config.folder)
    train = read_source(config.public, config.folder if there else None).train
    return downscale(train, config.downscale)


# A federation's data: one set of samples per client, perhaps a test set at the server, and public samples.


@dataclass(frozen=True)
class Federation:
    clients: Sequence[Samples]
    test: Samples | None  # the server's; None: models are evaluated at the clients alone
    classes: int  # or how many numbers are to be predicted
    preprocessing: Preprocessing
    public: Samples | None = None  # everybody has them; their labels are never used
    # in place of `clients`, where samples lie elsewhere: how many each says it has; 0: it has not yet
    remote: tuple[int, ...] = ()
    client_tests: ClientTests = field(default_factory=ClientTests)  # of the clients' own
    placeholder: Samples | None = None  # a made-up sample that is like all others, where the server has no other

    def __post_init__(self) -> None:
        if not self.clients and not self.remote:
            raise FedhmError("a federation needs at least one client")
        if self.clients and self.remote:
            raise FedhmError("a federation's clients are either all here or all remote")
        for number, count in enumerate(self.remote):
            if type(count) is not int or count < 0:
                raise FedhmError(f"client {number} says that it has {count!r} samples: it needs at least one")
        if self.test is not None and not len(self.test):
            raise FedhmError("the test set is empty")
        for number, samples in enumerate(self.clients):
            if not len(samples):
                raise FedhmError(
                    f"client {number} has no samples: use fewer clients, a larger data.alpha, or "
                    "data.partition = 'dirichlet', which gives every client the same number"
                )
        for name, samples in self._named():
            whole = not samples.labels.is_floating_point()
            if whole and (samples.labels.min() < 0 or samples.labels.max() >= self.classes):
                raise FedhmError(f"{name} has labels outside 0…{self.classes - 1}")
            self._check_kind(name, samples)
        side = min(self.input_shape[1:]) if self.example.are_images else 10**9
        if not 0 <= self.preprocessing.crop <= side:
            raise FedhmError(f"crop = {self.preprocessing.crop}, but images of {side} pixels can be padded by 0…{side}")
        if self.public is not None:
            self._check_kind("the public set", self.public)
            if len(self.public) < 2:  # batch normalisation has no variance of a single value
                raise FedhmError("the public set needs at least two samples")

    def check_targets(self, objective: Objective) -> None:
        """Refuse samples whose labels are not what the objective learns."""
        for name, samples in self._named():
            objective.check(samples.labels, self.classes, name)
            if isinstance(samples.inputs, Tokens):
                samples.inputs.check_targets(name)

    def _named(self) -> list[tuple[str, Samples]]:
        """Return all samples that are here, each with what a sentence calls them."""
        own = [(f"client {number}", samples) for number, samples in enumerate(self.clients)]
        return [*([] if self.test is None else [("the test set", self.test)]), *own, *self.client_tests.named()]

    @property
    def example(self) -> Samples:
        """Return samples of which the first tells the form of all."""
        return self._first()[1]

    def _first(self) -> tuple[str, Samples]:
        if named := self._named():
            return named[0]
        if self.placeholder is None:
            raise FedhmError("a federation of remote clients needs a test set, or a sample that is like theirs")
        return "the sample of the server", self.placeholder

    def _check_kind(self, name: str, samples: Samples) -> None:
        whose, first = self._first()
        if _kind(samples) != _kind(first):
            raise FedhmError(f"{name} has inputs of {_kind(samples)}, {whose} of {_kind(first)}")

    def fitted(self, fit: Callable[[Samples, str], Samples]) -> "Federation":
        """Return a federation whose samples have all been made to fit a model; `fit` is told whose they are."""
        return replace(
            self,
            clients=[fit(samples, f"client {number}") for number, samples in enumerate(self.clients)],
            test=None if self.test is None else fit(self.test, "the test set"),
            public=None if self.public is None else fit(self.public, "the public set"),
            client_tests=replace(
                self.client_tests,
                samples=[
                    fit(samples, f"the test set of client {n}") for n, samples in enumerate(self.client_tests.samples)
                ],
            ),
            placeholder=None if self.placeholder is None else fit(self.placeholder, "the sample of the server"),
        )

    @property
    def size(self) -> int:
        """Return how many clients there are."""
        return len(self.clients) or len(self.remote)

    def samples_of(self, client: int) -> int:
        """Return how many samples a client has."""
        return self.remote[client] if self.remote else len(self.clients[client])

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.example.inputs.shape[1:])

    def public_feed(self) -> Feed | None:
        return None if self.public is None else public_feed(self.public, self.preprocessing)


def public_feed(public: Samples, preprocessing: Preprocessing) -> Feed:
    """Return the public samples, each with its number in place of its label: logits on them are rows by that number.

    They are never augmented, since such a row belongs to the very input that the others saw.
    """
    numbered = Samples(public.inputs, torch.arange(len(public)))
    return Feed(numbered, replace(preprocessing, crop=0, flip=False))


def _kind(samples: Samples) -> str:
    if isinstance(samples.inputs, Tokens):
        return samples.inputs.kind
    return f"shape {tuple(samples.inputs.shape[1:])} and type {str(samples.inputs.dtype).removeprefix('torch.')}"


def from_arrays(
    clients: Sequence[DataLike],
    test: DataLike | None,
    crop: int = 0,
    flip: bool = False,
    dtype: torch.dtype = torch.float32,
    public: PublicLike | None = None,
    objective: Objective | None = None,
    client_test: float | Sequence[DataLike | None] = 0.0,
    seed: int = 0,
    reader: TextReader | None = None,
) -> Federation:
    """Make a federation of a user's own data sets; without an objective, labels are class numbers.

    `reader` makes tokens of texts that are not tokenized.
    Images in uint8 (N, C, H, W) are normalised; other floating-point input is brought to `dtype` and left as it is.
    """
    learned: Objective = objective or make("objectives", "classification")

    def read(data: DataLike, whose: str) -> Samples:
        return to_samples(data, whose, dtype, learned, reader)

    given = [read(data, f"client {number}") for number, data in enumerate(clients)]
    own, tests = client_tests_from(given, client_test, seed, read)
    own_test = None if test is None else read(test, "the test set")
    all_here = [*own, *(samples for _, samples in tests.named()), *([] if own_test is None else [own_test])]
    classes = learned.outputs([samples.labels for samples in all_here])
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if own and all(samples.are_images and len(samples) for samples in own):
        mean, std = channel_statistics(concatenate(own).tensor)
    everybodys = None if public is None else to_public_samples(public, dtype)
    return Federation(own, own_test, classes, Preprocessing(mean, std, crop, flip), everybodys, client_tests=tests)


def remote_federation(
    test: DataLike | None,
    classes: int,
    sizes: Sequence[int],
    preprocessing: Preprocessing,
    public: PublicLike | None = None,
    dtype: torch.dtype = torch.float32,
    objective: Objective | None = None,
    placeholder: Samples | None = None,
) -> Federation:
    """Make a federation of clients whose samples the server never sees: `sizes` has how many each says it has.

    So the server has to be told how many `classes` there are, and by which mean and deviation images are normalised;
    without a test set, also what samples are like.
    """
    learned: Objective = objective or make("objectives", "classification")
    own_test = None if test is None else to_samples(test, "the test set", dtype, learned)
    example = placeholder if own_test is None else own_test
    if example is not None:
        preprocessing.check(example)
    everybodys = None if public is None else to_public_samples(public, dtype)
    return Federation([], own_test, classes, preprocessing, everybodys, tuple(sizes), placeholder=placeholder)


# The data set that a config names, dealt out to clients.


def load_federation(config: DataConfig, clients: int, seed: int, base: str = "", per_token: bool = False) -> Federation:
    """Read the data set that `config` names and deal it out to clients.

    base       of text: the pretrained model whose tokenizer reads it
    per_token  of text: every token is to be predicted
    """
    if config.source.startswith(TEXT):
        read = read_text(config.source.removeprefix(TEXT), config.folder, base, config.max_length, per_token)
    else:
        read = read_source(config.source, config.folder)
    source = downscale_source(read, config.downscale)
    left, public = hold_out_public(source.train, config, seed)
    train = _chosen(left, config.train_samples, config.source, seed)
    if clients > len(train):
        raise FedhmError(f"{clients} clients cannot share {len(train)} samples: at least one each is needed")
    if train.labels.is_floating_point() and config.partition != "iid":
        raise FedhmError(f"data.partition = '{config.partition}' deals out labels, of which {config.source} has none")
    labels: np.ndarray[Any, np.dtype[np.int64]] = train.labels.numpy()
    rng = numpy_generator(seed, "partition")
    parts = PARTITIONS[config.partition](labels, clients, config, rng)
    dealt, test = [train.subset(torch.from_numpy(part)) for part in parts], source.test if config.test else None
    own, tests = hold_out_client_tests(dealt, config.client_test, seed)
    if config.validation:
        own, test = hold_out_validation(own, config.validation, seed)
    return Federation(
        own,
        test,
        source.classes,
        Preprocessing(source.mean, source.std, config.crop, config.flip),
        public,
        client_tests=tests,
    )


def _chosen(samples: Samples, count: int, source: str, seed: int) -> Samples:
    if count > len(samples):
        raise FedhmError(f"data.train_samples = {count}, but {source} has {len(samples)} to train on")
    if not count:
        return samples
    chosen = numpy_generator(seed, "train samples").choice(len(samples), count, replace=False)
    return samples.subset(torch.from_numpy(np.sort(chosen)))

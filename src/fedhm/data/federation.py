"""The data of a federation: samples of each client, perhaps a test set at the server, and public samples.

`from_arrays` makes a federation of a user's data, `load_federation` of the data set that a config names, and
`remote_federation` of remote clients, which only report how many samples they have. Functions that hold out samples
follow: test samples of each client, validation samples of all clients, and public samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhm.config.objective import Objective
from fedhm.config.registry import make
from fedhm.config.schema import CLIENT_TEST, DataConfig
from fedhm.data.columns import kind_of
from fedhm.data.convert import DataLike, PublicLike, to_public_samples, to_samples
from fedhm.data.images import downscale, downscale_shape, downscale_source
from fedhm.data.partition import PARTITIONS
from fedhm.data.samples import Feed, Preprocessing, Samples, concatenate, pooled_channel_statistics
from fedhm.data.sources import SOURCES, Normalisation, is_in_folder, published_normalisation, read_source
from fedhm.data.text import TEXT, TextReader, read_text_files
from fedhm.data.tokens import Tokens
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator

HELD_OUT = "held-out"  # data.public: from the data set itself


@dataclass(frozen=True)
class ClientTests:
    """The test samples of the clients: the samples themselves, or their numbers at remote clients."""

    samples: Sequence[Samples] = ()  # one for each client, perhaps of length 0; empty: no client tests
    remote: tuple[int, ...] = ()  # in their place: the number that each remote client reports
    share: float = 0.0  # remote clients without test samples hold out this share of their others

    def count(self, client: int) -> int:
        """Return the number of a client's test samples; 0 if it has none, or has not reported yet."""
        if self.remote:
            return self.remote[client]
        return len(self.samples[client]) if self.samples else 0

    def of(self, client: int) -> Samples | None:
        """Return a client's test samples, if they are here."""
        return self.samples[client] if self.samples else None

    def named(self) -> list[tuple[str, Samples]]:
        """Return the test sets that are here and not empty, each with its name in error messages."""
        return [(f"the test set of client {n}", samples) for n, samples in enumerate(self.samples) if len(samples)]

    def holders(self, sizes: Sequence[int]) -> list[int]:
        """Return the clients that have test samples, or may have some because they have not reported yet.

        sizes  the number of each client's other samples; 0: it has not reported yet
        """
        if not self.share and not any(self.count(client) for client in range(len(sizes))):
            return []
        return [client for client, size in enumerate(sizes) if self.count(client) or not size]


@dataclass(frozen=True)
class Federation:
    """The samples of all clients, and the samples that the server has."""

    clients: Sequence[Samples]
    test: Samples | None  # the server's; None: models are evaluated at the clients alone
    classes: int  # or how many numbers to predict
    preprocessing: Preprocessing
    public: Samples | None = None  # everybody has them; their labels are never used
    # in place of `clients`, for remote clients: the number of samples that each reports; 0: not reported yet
    remote: tuple[int, ...] = ()
    client_tests: ClientTests = field(default_factory=ClientTests)
    placeholder: Samples | None = None  # a sample of zeros, if the server has no samples

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
                    f"client {number} has no samples: leave it out of your own clients; of a data set that is dealt "
                    "out, use fewer clients, a larger data.alpha, or data.partition = 'dirichlet', which gives every "
                    "client the same number"
                )
        for name, samples in self._named():
            plain = not samples.labels.is_floating_point() and samples.labels.ndim == 1
            if plain and (samples.labels.min() < 0 or samples.labels.max() >= self.classes):
                raise FedhmError(f"{name} has labels outside 0…{self.classes - 1}")
            self._check_kind(name, samples)
        side = min(self.input_shape[1:]) if self.example.are_images else 10**9
        if not 0 <= self.preprocessing.crop <= side:
            raise FedhmError(f"crop = {self.preprocessing.crop}, but images of {side} pixels can be padded by 0…{side}")
        images = any(s.labels.ndim > (2 if s.labels.is_floating_point() else 1) for _, s in self._named())
        if images and (self.preprocessing.crop or self.preprocessing.flip):
            raise FedhmError(
                "crop and flip move images and not their targets: leave them out, and let the data set augment both"
            )
        if self.public is not None:
            self._check_kind("the public set", self.public)
            if len(self.public) < 2:  # batch normalisation has no variance of a single value
                raise FedhmError("the public set needs at least two samples")

    def check_targets(self, objective: Objective) -> None:
        """Refuse samples with labels that the objective does not learn."""
        for name, samples in self._named():
            objective.check(samples.labels, self.classes, name)
            if isinstance(samples.inputs, Tokens):
                samples.inputs.check_targets(name)

    def _named(self) -> list[tuple[str, Samples]]:
        """Return all samples that are here, each with their name in error messages."""
        own = [(f"client {number}", samples) for number, samples in enumerate(self.clients)]
        return [*([] if self.test is None else [("the test set", self.test)]), *own, *self.client_tests.named()]

    @property
    def example(self) -> Samples:
        """Return samples that are typical of all: the first one has the type and shape of every other."""
        return self._first()[1]

    def _first(self) -> tuple[str, Samples]:
        if named := self._named():
            return named[0]
        if self.placeholder is None:
            raise FedhmError("a federation of remote clients needs a test set, or a placeholder sample")
        return "the sample of the server", self.placeholder

    def _check_kind(self, name: str, samples: Samples) -> None:
        whose, first = self._first()
        if _kind(samples) != _kind(first):
            raise FedhmError(f"{name} has inputs of {_kind(samples)}, {whose} of {_kind(first)}")

    def map_samples(self, change: Callable[[Samples, str], Samples]) -> "Federation":
        """Return the federation with all samples changed; `change` gets samples and their name in error messages."""
        return replace(
            self,
            clients=[change(samples, f"client {number}") for number, samples in enumerate(self.clients)],
            test=None if self.test is None else change(self.test, "the test set"),
            public=None if self.public is None else change(self.public, "the public set"),
            client_tests=replace(
                self.client_tests,
                samples=[change(own, f"the test set of client {n}") for n, own in enumerate(self.client_tests.samples)],
            ),
            placeholder=None if self.placeholder is None else change(self.placeholder, "the sample of the server"),
        )

    @property
    def size(self) -> int:
        """Return the number of clients."""
        return len(self.clients) or len(self.remote)

    def samples_of(self, client: int) -> int:
        """Return the number of a client's samples."""
        return self.remote[client] if self.remote else len(self.clients[client])

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.example.inputs.shape[1:])

    def public_feed(self) -> Feed | None:
        return None if self.public is None else public_feed(self.public, self.preprocessing)


def public_feed(public: Samples, preprocessing: Preprocessing) -> Feed:
    """Return the public samples, each with its index in place of its label: logits are rows by that index.

    They are never augmented: a row of logits belongs to exactly the input that all others saw.
    """
    numbered = Samples(public.inputs, torch.arange(len(public)))
    return Feed(numbered, replace(preprocessing, crop=0, flip=False))


def _kind(samples: Samples) -> str:
    return kind_of(samples.inputs) if isinstance(samples.inputs, Tensor) else samples.inputs.kind


def from_arrays(
    clients: Sequence[DataLike],
    test: DataLike | None,
    *,
    crop: int = 0,
    flip: bool = False,
    dtype: torch.dtype = torch.float32,
    public: PublicLike | None = None,
    objective: Objective | None = None,
    client_test: float | Sequence[DataLike | None] = 0.0,
    seed: int = 0,
    reader: TextReader | None = None,
) -> Federation:
    """Return the federation of a user's own data sets; without an objective, labels are class numbers.

    uint8 images (N, C, H, W) are normalised. Floating-point inputs are converted to `dtype`. `reader` tokenizes texts.
    """
    learned: Objective = objective or make("objectives", "classification")

    def read(data: DataLike, whose: str) -> Samples:
        return to_samples(data, whose, dtype, learned, reader)

    given = [read(data, f"client {number}") for number, data in enumerate(clients)]
    own, tests = _client_tests_from(given, client_test, seed, read)
    own_test = None if test is None else read(test, "the test set")
    all_here = [*own, *(samples for _, samples in tests.named()), *([] if own_test is None else [own_test])]
    classes = learned.outputs([samples.labels for samples in all_here])
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if own and all(samples.are_images and len(samples) for samples in own):
        channels = {samples.inputs.shape[1] for samples in own}
        mean, std = pooled_channel_statistics(own) if len(channels) == 1 else ((), ())  # else they are refused below
    public_samples = None if public is None else to_public_samples(public, dtype)
    return Federation(own, own_test, classes, Preprocessing(mean, std, crop, flip), public_samples, client_tests=tests)


def remote_federation(
    test: DataLike | None,
    classes: int,
    sizes: Sequence[int],
    preprocessing: Preprocessing,
    *,
    public: PublicLike | None = None,
    dtype: torch.dtype = torch.float32,
    objective: Objective | None = None,
    placeholder: Samples | None = None,
) -> Federation:
    """Return the federation of clients whose samples the server never sees; `sizes` are the numbers they report.

    So the app states the number of `classes`, and how images are normalised. Without a test set, it also gives a
    placeholder sample.
    """
    learned: Objective = objective or make("objectives", "classification")
    own_test = None if test is None else to_samples(test, "the test set", dtype, learned)
    example = placeholder if own_test is None else own_test
    if example is not None:
        preprocessing.check(example)
    public_samples = None if public is None else to_public_samples(public, dtype)
    return Federation([], own_test, classes, preprocessing, public_samples, tuple(sizes), placeholder=placeholder)


def load_federation(config: DataConfig, clients: int, seed: int, base: str = "", per_token: bool = False) -> Federation:
    """Read the data set that `config` names and partition it over clients.

    base       for text: the pretrained model whose tokenizer reads it
    per_token  for text: every token has a target
    """
    published = _published_normalisation(config)
    if config.source.startswith(TEXT):
        read = read_text_files(config.source.removeprefix(TEXT), config.folder, base, config.max_length, per_token)
    else:
        read = read_source(config.source, config.folder)
    source = downscale_source(read, config.downscale)
    left, public = _hold_out_public(source.train, config, seed)
    own, tests = _partitioned(left, config, clients, seed)
    test = source.test if config.test else None
    if config.validation:
        own, test = hold_out_validation(own, config.validation, seed)
    mean, std = published or (source.mean, source.std)
    return Federation(
        own,
        test,
        source.classes,
        Preprocessing(mean, std, config.crop, config.flip),
        public,
        client_tests=tests,
    )


def expected_federation(config: DataConfig, clients: int, seed: int) -> Federation:
    """Return the federation that a data set of known size makes, without its files: each client's number of samples.

    Its labels are as evenly spread as the published ones, and partitioned as `load_federation` does. Sizes are exact,
    except for `dirichlet-unequal` if some samples are chosen or held out before: then they depend on the labels left.
    """
    known = SOURCES[config.source]
    labels = torch.arange(known.train_samples) % known.outputs
    left = Samples(torch.zeros(len(labels), 1), labels)
    if config.public == HELD_OUT:
        left, _ = _hold_out_public(left, config, seed)
    own, tests = _partitioned(left, config, clients, seed)
    if config.validation:
        own, _ = hold_out_validation(own, config.validation, seed)
    shape = downscale_shape(known.shape, config.downscale)
    public = torch.zeros(config.public_samples, *shape)
    return Federation(
        [],
        None,
        known.outputs,
        Preprocessing(),
        Samples(public, torch.zeros(len(public), dtype=torch.int64)) if config.public else None,
        tuple(len(samples) for samples in own),
        ClientTests(remote=tuple(len(samples) for samples in tests.samples)),
        placeholder=Samples(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64)),
    )


def _partitioned(samples: Samples, config: DataConfig, clients: int, seed: int) -> tuple[list[Samples], ClientTests]:
    """Return each client's training samples, and its test samples if it holds some out."""
    train = _chosen(samples, config.train_samples, config.source, seed)
    if clients > len(train):
        raise FedhmError(f"{clients} clients cannot share {len(train)} samples: at least one each is needed")
    if train.labels.is_floating_point() and config.partition != "iid":
        raise FedhmError(
            f"data.partition = '{config.partition}' partitions by label, and {config.source} has no labels"
        )
    labels: np.ndarray[Any, np.dtype[np.int64]] = train.labels.numpy()
    rng = numpy_generator(seed, "partition")
    parts = PARTITIONS[config.partition](labels, clients, config, rng)
    return hold_out_client_tests([train.subset(torch.from_numpy(part)) for part in parts], config.client_test, seed)


def _published_normalisation(config: DataConfig) -> Normalisation | None:
    if config.normalisation == "measured":
        return None
    found = published_normalisation(config.source)
    if found is None:
        known = ", ".join(name for name in SOURCES if published_normalisation(name))
        raise FedhmError(
            f"data.normalisation = 'published' is for data sets of FedHM's published code, {known}: "
            f"set 'measured' for {config.source}"
        )
    return found


def _chosen(samples: Samples, count: int, source: str, seed: int) -> Samples:
    if count > len(samples):
        raise FedhmError(f"data.train_samples = {count}, but {source} has {len(samples)} to train on")
    if not count:
        return samples
    chosen = numpy_generator(seed, "train samples").choice(len(samples), count, replace=False)
    return samples.subset(torch.from_numpy(np.sort(chosen)))


def hold_out_client_tests(clients: Sequence[Samples], share: float, seed: int) -> tuple[list[Samples], ClientTests]:
    """Return the clients' training samples and their test samples."""
    if not share:
        return list(clients), ClientTests()
    pairs = [split_client_test(samples, share, seed, client) for client, samples in enumerate(clients)]
    return [left for left, _ in pairs], ClientTests([tests for _, tests in pairs])


def split_client_test(samples: Samples, share: float, seed: int, client: int) -> tuple[Samples, Samples]:
    """Return a client's training samples and its test samples, chosen at random.

    A client with two samples or more has at least one of both.
    """
    count = max(0, min(max(1, round(share * len(samples))), len(samples) - 1))
    order = torch.from_numpy(numpy_generator(seed, "client test", client).permutation(len(samples)))
    return samples.subset(order[count:].sort().values), samples.subset(order[:count].sort().values)


def _client_tests_from(
    clients: Sequence[Samples], given: float | Sequence[Any], seed: int, read: Callable[[Any, str], Samples]
) -> tuple[list[Samples], ClientTests]:
    """Return the clients' training samples and their test samples: a share, or a user's own test set for each.

    read  converts a user's data to samples; it gets their name in error messages
    """
    if isinstance(given, float | int):
        return hold_out_client_tests(clients, check_test_share(given), seed)
    if not isinstance(given, list | tuple):
        kind = type(given).__name__
        raise FedhmError(f"client_test must be a share, or a list with a test set for each client, not a {kind}")
    if len(given) != len(clients):
        raise FedhmError(f"client_test has {len(given)} test sets for {len(clients)} clients: each needs one, or None")
    nothing = torch.arange(0)
    tests = [
        samples.subset(nothing) if data is None else read(data, f"the test set of client {client}")
        for client, (samples, data) in enumerate(zip(clients, given, strict=True))
    ]
    return list(clients), ClientTests(tests if any(len(samples) for samples in tests) else ())


def default_test_share(test: bool) -> float:
    """Return the default share that clients hold out; `test`: the server has a test set."""
    return 0.0 if test else CLIENT_TEST


def check_test_share(given: Any) -> float:
    """Return a user's share of test samples, or refuse it."""
    if isinstance(given, bool) or not isinstance(given, float | int) or not 0 <= given < 1:
        raise FedhmError(f"client_test must be a share of every client's samples, from 0 to below 1, not {given!r}")
    return float(given)


def hold_out_validation(clients: Sequence[Samples], share: float, seed: int) -> tuple[list[Samples], Samples]:
    """Return each client's training samples, and validation samples held out of all clients at random.

    They serve to choose settings without the test set. Shares are rounded over all clients together, so that many
    small ones do not all round to nothing. Each client keeps at least one sample.
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


def _hold_out_public(train: Samples, config: DataConfig, seed: int) -> tuple[Samples, Samples | None]:
    """Return the samples for the clients, and the public samples of `config` in random order, for distillation."""
    if not config.public:
        return train, None
    held_out = config.public == HELD_OUT
    supply = train if held_out else _read_public(config)
    wanted = config.public_samples
    if wanted > len(supply):
        name = config.source if held_out else config.public
        raise FedhmError(f"data.public_samples is {wanted}, but {name} has {len(supply)} samples for training")
    order = torch.from_numpy(numpy_generator(seed, "public").permutation(len(supply)))
    left = train.subset(order[wanted:].sort().values) if held_out else train
    return left, supply.subset(order[:wanted])


def _read_public(config: DataConfig) -> Samples:
    """Read the public data set from the source's folder, if its files are there, or from its default places."""
    there = config.public == config.source or is_in_folder(config.public, config.folder)
    train = read_source(config.public, config.folder if there else None).train
    return downscale(train, config.downscale)

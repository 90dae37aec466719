"""A federation's data: one set of samples per client, perhaps a test set at the server, and public samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fedhm.config.plugins import make
from fedhm.config.sections.objective import Objective
from fedhm.data.batches import Feed, Preprocessing
from fedhm.data.held_out.client_tests import ClientTests, brought
from fedhm.data.own import DataLike, PublicLike, own_public, own_samples
from fedhm.data.raw_text import TextReader
from fedhm.data.samples import Samples, channel_statistics, concatenate
from fedhm.data.tokens import Tokens
from fedhm.errors import FedhmError


@dataclass(frozen=True)
class Federation:
    clients: Sequence[Samples]
    test: Samples | None  # the server's; None: models are evaluated at the clients alone
    classes: int  # or how many numbers are to be predicted
    preprocessing: Preprocessing
    public: Samples | None = None  # everybody has them; their labels are never used
    # in place of `clients`, where samples lie elsewhere: how many each says it has; 0: it has not yet
    remote: tuple[int, ...] = ()
    tests: ClientTests = field(default_factory=ClientTests)  # of the clients' own
    form: Samples | None = None  # a made-up sample that is like all others, where the server has no other

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
        return [*([] if self.test is None else [("the test set", self.test)]), *own, *self.tests.named()]

    @property
    def example(self) -> Samples:
        """Return samples of which the first tells the form of all."""
        return self._first()[1]

    def _first(self) -> tuple[str, Samples]:
        if named := self._named():
            return named[0]
        if self.form is None:
            raise FedhmError("a federation of remote clients needs a test set, or a sample that is like theirs")
        return "the sample of the server", self.form

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
            tests=replace(
                self.tests,
                samples=[fit(samples, f"the test set of client {n}") for n, samples in enumerate(self.tests.samples)],
            ),
            form=None if self.form is None else fit(self.form, "the sample of the server"),
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


def gathered(
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
        return own_samples(data, whose, dtype, learned, reader)

    given = [read(data, f"client {number}") for number, data in enumerate(clients)]
    own, tests = brought(given, client_test, seed, read)
    own_test = None if test is None else read(test, "the test set")
    all_here = [*own, *(samples for _, samples in tests.named()), *([] if own_test is None else [own_test])]
    classes = learned.outputs([samples.labels for samples in all_here])
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if own and all(samples.are_images and len(samples) for samples in own):
        mean, std = channel_statistics(concatenate(own).tensor)
    everybodys = None if public is None else own_public(public, dtype)
    return Federation(own, own_test, classes, Preprocessing(mean, std, crop, flip), everybodys, tests=tests)


def remote_federation(
    test: DataLike | None,
    classes: int,
    sizes: Sequence[int],
    preprocessing: Preprocessing,
    public: PublicLike | None = None,
    dtype: torch.dtype = torch.float32,
    objective: Objective | None = None,
    form: Samples | None = None,
) -> Federation:
    """Make a federation of clients whose samples the server never sees: `sizes` has how many each says it has.

    So the server has to be told how many `classes` there are, and by which mean and deviation images are normalised;
    without a test set, also what samples are like.
    """
    learned: Objective = objective or make("objectives", "classification")
    own_test = None if test is None else own_samples(test, "the test set", dtype, learned)
    example = form if own_test is None else own_test
    if example is not None:
        preprocessing.check(example)
    everybodys = None if public is None else own_public(public, dtype)
    return Federation([], own_test, classes, preprocessing, everybodys, tuple(sizes), form=form)

"""Data sets are read when a batch needs them: transforms are random, results are repeatable, errors name the sample."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import fedhm
from conftest import no_figures
from fedhm.data.convert import to_samples
from fedhm.data.federation import from_arrays
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.objectives.classification import Classification
from fedhm.objectives.segmentation import Segmentation

SETTINGS: dict[str, Any] = {
    "train": {"rounds": 2, "epochs": 2, "batch": 4},
    "engine": {"threads": 1, "server_threads": 1, "workers": 1},
    "method": {"tiers": [1, "1/4"]},
}
X, Y = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


class Noisy(Dataset[Any]):
    """Samples with noise of all three global generators, which counts its reads."""

    def __init__(self, x: Tensor = X, y: Tensor = Y, noise: float = 0.1) -> None:
        self.x, self.y, self.noise, self.reads = x, y, noise, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        drawn = torch.randn(6) + float(np.random.randn()) + random.random()
        return self.x[index] + self.noise * drawn, int(self.y[index])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def lazy(data: Any, objective: Any = None) -> Samples:
    return to_samples(data, "client 0", torch.float32, objective or Classification())


def weights(result: fedhm.Result) -> dict[str, Tensor]:
    return result.networks["full"].state_dict()


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_every_epoch_reads_again_and_its_randomness_is_its_own() -> None:
    data = Noisy()
    samples = lazy(data)
    assert samples.are_lazy
    assert samples.nbytes == samples.labels.nbytes
    feed, before = Feed(samples, Preprocessing()), data.reads
    generator = torch.Generator().manual_seed(1)
    epochs = [dict(rows(feed.shuffled(4, generator))) for _ in range(2)]
    assert data.reads == before + 2 * len(data)
    assert epochs[0].keys() == epochs[1].keys()
    assert all(not torch.equal(epochs[0][key], epochs[1][key]) for key in epochs[0])
    again = dict(rows(feed.shuffled(4, torch.Generator().manual_seed(1))))
    assert all(torch.equal(again[key], epochs[0][key]) for key in again)


def rows(batches: Any) -> Any:
    """Yield each sample by the place of the nearest one without noise."""
    for inputs, _ in batches:
        for row in inputs:
            yield int((X - row + (row - X).mean(1, keepdim=True)).square().sum(1).argmin()), row


def test_reading_leaves_the_global_generators_alone() -> None:
    samples = lazy(Noisy())
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    list(Feed(samples, Preprocessing()).ordered(4))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_evaluation_reads_the_same_in_batches_of_any_size() -> None:
    feed = Feed(lazy(Noisy()), Preprocessing())
    small, large = (torch.cat([inputs for inputs, _ in feed.ordered(size)]) for size in (4, 24))
    assert torch.equal(small, large)


def test_without_transforms_a_run_has_the_bits_of_arrays() -> None:
    """The order of batches differs: lazy batches draw a seed. One batch of all samples is the same."""
    settings = SETTINGS | {"train": {"rounds": 2, "epochs": 1, "batch": 24}}
    plain = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    runs = [fedhm.run(plain, [data], (X, Y), settings) for data in (Noisy(noise=0.0), (X, Y))]
    assert runs[0].metrics["full"].accuracy == pytest.approx(runs[1].metrics["full"].accuracy)
    for name, tensor in weights(runs[0]).items():
        torch.testing.assert_close(tensor, weights(runs[1])[name])


def test_results_do_not_depend_on_the_number_of_workers() -> None:
    clients = [Noisy(X[i::4], Y[i::4]) for i in range(4)]
    one = fedhm.run(model(), clients, Noisy(), SETTINGS | {"federation": {"participation": 1.0}})
    two = SETTINGS | {"federation": {"participation": 1.0}, "engine": {**SETTINGS["engine"], "workers": 2}}
    assert equal(weights(one), weights(fedhm.run(model(), clients, Noisy(), two)))


@no_figures()
def test_a_resumed_run_ends_as_if_never_interrupted(tmp_path: Path) -> None:
    clients = [Noisy(X[i::2], Y[i::2]) for i in range(2)]
    whole = fedhm.run(model(), clients, Noisy(), SETTINGS, tmp_path / "whole")

    class Stop:
        def started(self, done: int, rounds: int) -> None: ...
        def task_done(self, round_number: int, what: str, done: int, of: int) -> None: ...
        def round_done(self, record: fedhm.Record) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedhm.run(model(), clients, Noisy(), SETTINGS, tmp_path / "part", watchers=[Stop()])
    resumed = fedhm.run(model(), clients, Noisy(), SETTINGS, tmp_path / "part")
    assert equal(weights(whole), weights(resumed))
    with pytest.raises(fedhm.FedhmError, match="belongs to another run"):
        fedhm.run(model(), [Noisy(X[i::2] + 1, Y[i::2]) for i in range(2)], Noisy(), SETTINGS, tmp_path / "part")


def test_a_client_test_share_is_held_out_of_lazy_data() -> None:
    found = fedhm.run(model(), [Noisy(X[i::2], Y[i::2]) for i in range(2)], None, SETTINGS, client_test=0.25)
    assert found.clients["full"].overall.samples == 6


class Broken(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 7 and self.reads > 60:
            raise OSError("the file is gone")
        return super().__getitem__(index)


def test_an_error_while_training_names_the_sample() -> None:
    with pytest.raises(fedhm.FedhmError, match=r"sample 7 of client 0 cannot be read: OSError\('the file is gone'\)"):
        fedhm.run(model(), [Broken()], (X, Y), SETTINGS)
    workers = SETTINGS | {"engine": {**SETTINGS["engine"], "workers": 2}, "federation": {"participation": 1.0}}
    with pytest.raises(fedhm.FedhmError, match="sample 7 of client 0 cannot be read"):
        fedhm.run(model(), [Broken(), Broken()], (X, Y), workers)


def test_non_finite_samples_are_named_before_training_and_not_blamed_on_the_rate() -> None:
    bad = X.clone()
    bad[5, 2] = float("nan")
    with pytest.raises(fedhm.FedhmError, match="the inputs of client 0 hold NaN or infinite values, first in sample 5"):
        fedhm.run(model(), [(bad, Y)], (X, Y), SETTINGS)
    with pytest.raises(fedhm.FedhmError, match="sample 5 of client 0 holds NaN or infinite values"):
        fedhm.run(model(), [Noisy(bad)], (X, Y), SETTINGS)
    with pytest.raises(fedhm.FedhmError, match="the inputs of the test set hold NaN"):
        fedhm.run(model(), [(X, Y)], (bad, Y), SETTINGS)


class Ragged(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(6 if index < 9 else 7), 0


def test_samples_of_different_shapes_are_named() -> None:
    with pytest.raises(fedhm.FedhmError, match=r"sample 9 has shape \(7,\) and type float32, the first shape \(6,\)"):
        lazy(Ragged())


class OwnGenerator(Noisy):
    rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + float(self.rng.normal()), int(self.y[index])


def test_a_generator_of_its_own_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="client 0 gives another sample 0 at every read"):
        lazy(OwnGenerator())


class Listed(Noisy):
    """Has its targets in a list, as data sets of torchvision do."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = Y.tolist()


def test_targets_in_a_list_spare_a_pass() -> None:
    for data, inner in ((listed := Listed(), listed), (Subset(other := Listed(), [3, 4, 5]), other)):
        samples = lazy(data)
        assert inner.reads <= 6 < len(inner)
        assert samples.labels.tolist() == [int(data[i][1]) for i in range(len(data))]


class Pictures(Dataset[Any]):
    def __init__(self) -> None:
        self.pixels = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]), index % 2


def test_pillow_images_are_normalised_and_augmented_as_those_in_memory() -> None:
    data = Pictures()
    pixels = torch.from_numpy(data.pixels).permute(0, 3, 1, 2)
    eager = from_arrays([(pixels, torch.arange(10) % 2)], None, client_test=0.2)
    read = from_arrays([data], None, client_test=0.2)
    assert read.clients[0].are_images
    assert read.preprocessing == eager.preprocessing
    first, second = (
        torch.cat([inputs for inputs, _ in Feed(each.clients[0], each.preprocessing).ordered(3)])
        for each in (eager, read)
    )
    assert torch.equal(first, second)
    assert second.is_contiguous(memory_format=torch.channels_last)
    with_crop = Feed(read.clients[0], Preprocessing((0.5,) * 3, (0.5,) * 3, crop=1, flip=True))
    inputs, _ = next(with_crop.shuffled(4, torch.Generator().manual_seed(0)))
    assert inputs.shape == (4, 3, 8, 8)


def test_a_loader_gives_its_data_set() -> None:
    plain = lazy(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True))
    assert torch.equal(plain.tensor, X)
    part = lazy(DataLoader(Noisy(), sampler=SubsetRandomSampler([2, 5])))
    assert part.labels.tolist() == [2, 2]
    with pytest.raises(fedhm.FedhmError, match="client 0 is a DataLoader with a WeightedRandomSampler"):
        lazy(DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0] * 24, 5)))


def test_a_loaders_own_collate_fn_makes_the_batches() -> None:
    def padded(items: list[tuple[list[float], int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(values) for values, _ in items)
        rows = [values + [0.0] * (longest - len(values)) for values, _ in items]
        return torch.tensor(rows), torch.tensor([label for _, label in items])

    data = [([1.0] * (1 + number % 3), number % 2) for number in range(8)]
    samples = lazy(DataLoader(data, batch_size=2, collate_fn=padded))  # type: ignore[arg-type]
    assert samples.labels.tolist() == [0, 1] * 4
    shapes = {inputs.shape for inputs, _ in Feed(samples, Preprocessing()).ordered(2)}
    assert shapes <= {(2, 1), (2, 2), (2, 3)}
    assert len(shapes) > 1
    with pytest.raises(fedhm.FedhmError, match=r"collate_fn of client 0 cannot make a batch of the samples 0, 1"):
        lazy(DataLoader(data, batch_size=2, collate_fn=lambda items: items[99]))  # type: ignore[arg-type]


class Masks(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.randn(3, 16, 16)
        return image, (image[0] > 0).long() * 2


def test_masks_come_with_their_images_and_are_not_kept() -> None:
    samples = lazy(Masks(), Segmentation())
    assert samples.labels.shape == (6, 1, 2)
    inputs, masks = next(Feed(samples, Preprocessing()).shuffled(6, torch.Generator().manual_seed(0)))
    assert masks.shape == (6, 16, 16)
    assert torch.equal(masks, (inputs[:, 0] > 0).long() * 2)

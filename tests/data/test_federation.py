"""A federation is checked when it is made."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from fedhm.config.schema import Config, DataConfig
from fedhm.data.federation import Federation, expected_federation, from_arrays, load_federation, remote_federation
from fedhm.data.samples import Preprocessing, Samples, Source
from fedhm.data.sources import SOURCES, NamedSource
from fedhm.errors import FedhmError
from fedhm.runs.fingerprint import data_facts, fingerprint


def test_digits_are_dealt_out_by_seed() -> None:
    first, again = (load_federation(DataConfig(partition="dirichlet"), 20, seed=1) for _ in range(2))
    other = load_federation(DataConfig(partition="dirichlet"), 20, seed=2)
    assert sum(len(samples) for samples in first.clients) == 1442
    assert (first.classes, first.input_shape) == (10, (1, 8, 8))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first.clients, again.clients, strict=True))
    assert not all(torch.equal(a.inputs, b.inputs) for a, b in zip(first.clients, other.clients, strict=True))


def test_a_client_without_samples_is_an_error() -> None:
    with pytest.raises(FedhmError, match=r"client \d+ has no samples: .* use fewer clients"):
        load_federation(DataConfig(partition="dirichlet-unequal", alpha=0.001), 50, seed=0)
    with pytest.raises(FedhmError, match="2000 clients cannot share 1442 samples"):
        load_federation(DataConfig(), 2000, seed=0)


def test_own_data_in_any_form() -> None:
    inputs, labels = torch.randn(10, 4), torch.arange(10) % 3
    for data in [
        (inputs, labels),
        (inputs.numpy(), labels.numpy()),
        TensorDataset(inputs, labels),
        [(x.numpy(), int(y)) for x, y in zip(inputs, labels, strict=True)],
    ]:
        federation = from_arrays([data], data)  # type: ignore[list-item, arg-type]
        assert torch.equal(federation.clients[0].inputs, inputs)
        assert torch.equal(federation.test.labels, labels)
        assert federation.classes == 3


def test_numpys_float64_comes_to_the_type_of_the_model() -> None:
    data = (np.zeros((3, 4)), np.zeros(3))
    assert from_arrays([data], data).test.inputs.dtype == torch.float32
    assert from_arrays([data], data, dtype=torch.float64).test.inputs.dtype == torch.float64


def test_own_images_as_pillow_images() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
    pairs = [(Image.fromarray(image), 0) for image in pixels]
    federation = from_arrays([pairs], pairs)  # type: ignore[list-item, arg-type]
    assert torch.equal(federation.test.inputs, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert federation.test.are_images


def test_own_images_are_normalised_by_the_clients_pixels() -> None:
    pixels = torch.full((4, 1, 2, 2), 51, dtype=torch.uint8)
    pixels[:, :, 0] = 153
    federation = from_arrays([(pixels, torch.zeros(4))], (pixels, torch.zeros(4)))
    assert federation.preprocessing.mean == pytest.approx((0.4,))
    assert federation.preprocessing.std == pytest.approx((0.2,))


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([], "at least one client"),
        ([(torch.zeros(0, 4), torch.zeros(0))], "client 0 has no samples"),
        ([(torch.zeros(3, 5), torch.zeros(3))], r"client 0 has inputs of shape \(5,\).*the test set of shape \(4,\)"),
        ([(torch.zeros(3, 4).byte(), torch.zeros(3))], r"type uint8, the test set of .* type float32"),
        ([(torch.zeros(3, 4), torch.tensor([0.5, 1, 1]))], "whole class numbers"),
        ([(["one", 2], [0, 1])], "must be arrays of numbers"),
        ([(["one"], ["two"])], "client 0 has texts, and a model reads tokens"),
        ([[{"image": 1}]], "client 0 has the columns 'image', and none is called 'label'"),
        ([(torch.zeros(3, 4), torch.zeros(2))], "labels must be one integer per sample"),
        ([(torch.zeros(3, 4), torch.tensor([0, -1, 0]))], "labels outside 0…1"),
        (["data"], "a pair"),
        ([["one", "two"]], "must be pairs of an array and a class number"),
        ([[(np.zeros(2), 0), (np.zeros(3), 0)]], "differ in shape"),
        ([TensorDataset(torch.zeros(0, 4), torch.zeros(0))], "client 0 has no samples"),
    ],
)
def test_wrong_data_is_one_sentence(clients: list[object], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        from_arrays(clients, (torch.zeros(2, 4), torch.tensor([0, 1])))  # type: ignore[arg-type]


def test_an_empty_test_set_is_an_error(federation: Federation) -> None:
    empty = federation.test.subset(torch.zeros(0, dtype=torch.int64))
    with pytest.raises(FedhmError, match="test set is empty"):
        Federation(federation.clients, empty, 4, federation.preprocessing)


TEST = (torch.zeros(6, 1, 4, 4).byte(), torch.arange(6) % 3)
SEEN = Preprocessing((0.5,), (0.2,))


def test_remote_clients_are_known_by_their_numbers_of_samples() -> None:
    federation = remote_federation(TEST, 5, [7, 9], SEEN, public=TEST[0])
    assert (federation.size, federation.classes, list(federation.clients)) == (2, 5, [])
    assert [federation.samples_of(client) for client in range(2)] == [7, 9]
    assert federation.test.are_images
    assert federation.public is not None
    assert len(federation.public) == 6
    floats = remote_federation((np.zeros((3, 4)), np.zeros(3)), 2, [1], Preprocessing(), dtype=torch.float64)
    assert floats.test.inputs.dtype == torch.float64


def test_local_clients_have_sizes_too(federation: Federation) -> None:
    assert federation.size == 8
    assert [federation.samples_of(client) for client in range(8)] == [20] * 8


@pytest.mark.parametrize(
    ("sizes", "preprocessing", "sentence"),
    [
        ([], SEEN, "at least one client"),
        ([3, -1], SEEN, "client 1 says that it has -1 samples"),
        ([3, 2.5], SEEN, r"client 1 says that it has 2\.5 samples"),
        ([True], SEEN, "client 0 says that it has True samples"),
        ([3], Preprocessing(), "give mean and std of each channel, 1 of both"),
        ([3], Preprocessing((0.5, 0.5), (0.2, 0.2)), "give mean and std of each channel, 1 of both"),
    ],
)
def test_wrong_remote_clients_are_one_sentence(sizes: list[int], preprocessing: Preprocessing, sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        remote_federation(TEST, 3, sizes, preprocessing)


def test_a_test_label_beyond_the_classes_is_an_error() -> None:
    with pytest.raises(FedhmError, match="the test set has labels outside 0…1"):
        remote_federation(TEST, 2, [3], SEEN)


def test_clients_are_not_here_and_remote_at_once(federation: Federation) -> None:
    with pytest.raises(FedhmError, match="either all here or all remote"):
        replace(federation, remote=(3,))


def test_more_samples_at_remote_clients_are_the_same_run() -> None:
    before, after = (remote_federation(TEST, 3, sizes, SEEN) for sizes in ([7, 9], [8, 9]))
    config, weights = Config(), {"weight": torch.ones(2)}
    assert fingerprint(config, weights, before) == fingerprint(config, weights, after)
    other = remote_federation((TEST[0] + 1, TEST[1]), 3, [7, 9], SEEN)
    assert fingerprint(config, weights, before) != fingerprint(config, weights, other)
    facts = data_facts(after)
    assert (facts.clients, facts.samples, facts.digest) == (2, 17, data_facts(before).digest)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "dirichlet-feddf", "dirichlet-unequal"])
@pytest.mark.parametrize("more", [{"public": "held-out"}, {"validation": 0.2}, {"client_test": 0.3}], ids=str)
def test_sizes_are_known_without_the_files(
    partition: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if partition == "dirichlet-unequal" and "public" in more:
        return  # sizes depend on the labels that are left
    labels = torch.arange(600)[torch.randperm(600, generator=torch.Generator().manual_seed(0))] % 10
    samples = Samples(torch.zeros(600, 3, 8, 8, dtype=torch.uint8), labels)
    source = Source(samples, samples, 10, (0.5,) * 3, (0.5,) * 3)
    monkeypatch.setitem(SOURCES, "stand-in", NamedSource(lambda _: source, (3, 8, 8), 10, train_samples=600))
    config = DataConfig(source="stand-in", partition=partition, downscale=2, public_samples=50, **more)
    read, expected = load_federation(config, 7, seed=1), expected_federation(config, 7, seed=1)
    assert [expected.samples_of(client) for client in range(7)] == [read.samples_of(client) for client in range(7)]
    assert [expected.client_tests.count(n) for n in range(7)] == [read.client_tests.count(n) for n in range(7)]
    assert expected.input_shape == read.input_shape == (3, 4, 4)
    assert len(expected.public or ()) == len(read.public or ())

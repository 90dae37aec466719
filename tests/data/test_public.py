"""Public samples are nobody's own, of the federation's kind, and part of what makes a run that run."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedhm
from conftest import small_config, small_model
from fedhm.config.schema import DataConfig
from fedhm.data.federation import Federation, from_arrays, load_federation
from fedhm.data.samples import Samples
from fedhm.data.sources import SOURCES, NamedSource, read_source
from fedhm.errors import FedhmError
from fedhm.runs.fingerprint import fingerprint


def images(*parts: Samples) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for samples in parts for image in samples.inputs)


def test_held_out_samples_are_taken_from_the_clients() -> None:
    config = DataConfig(public="held-out", public_samples=300)
    federation, again, other = (load_federation(config, 7, seed) for seed in (1, 1, 2))
    assert federation.public is not None
    assert again.public is not None
    assert other.public is not None
    assert len(federation.public) == 300
    train = read_source("digits", None).train
    assert images(federation.public, *federation.clients) == images(train)
    assert torch.equal(federation.public.inputs, again.public.inputs)
    assert not torch.equal(federation.public.inputs, other.public.inputs)


def test_another_source_leaves_the_clients_their_samples() -> None:
    without = load_federation(DataConfig(), 7, 1)
    federation = load_federation(DataConfig(public="digits", public_samples=1442), 7, 1)
    assert federation.public is not None
    assert images(federation.public) == images(*without.clients)
    for ours, theirs in zip(federation.clients, without.clients, strict=True):
        assert torch.equal(ours.inputs, theirs.inputs)


def test_public_data_that_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = read_source("digits", None)
    coloured = replace(digits, train=Samples(digits.train.inputs.repeat(1, 3, 1, 1), digits.train.labels))
    monkeypatch.setitem(SOURCES, "coloured", NamedSource(lambda _: coloured))
    for settings, clients, sentence in (
        ({"public": "held-out", "public_samples": 2000}, 5, "data.public_samples is 2000, but digits has 1442 samples"),
        ({"public": "digits", "public_samples": 1443}, 5, "data.public_samples is 1443, but digits has 1442 samples"),
        ({"public": "held-out", "public_samples": 1440}, 5, "5 clients cannot share 2 samples"),
        ({"public": "held-out", "public_samples": 1}, 5, "the public set needs at least two samples"),
        ({"public": "digit"}, 5, "there is no data source 'digit': did you mean 'digits'"),
        ({"public": "coloured"}, 5, r"public set has inputs of shape \(3, 8, 8\) .* test set of shape \(1, 8, 8\)"),
    ):
        with pytest.raises(FedhmError, match=sentence):
            load_federation(DataConfig.model_validate(settings), clients, 0)


def test_a_folder_of_parquet_files_is_that_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path | None]] = []

    def read(name: str, folder: Path | None) -> object:
        asked.append((name, folder))
        return read_source("digits", None)

    monkeypatch.setattr("fedhm.data.federation.read_source", read)
    monkeypatch.setattr("fedhm.data.federation.read_source", read)
    for public in ("hf:other", "hf:mine", "cifar100"):
        load_federation(DataConfig(source="hf:mine", public=public, folder=Path("here")), 5, 0)
    assert asked[1::2] == [("hf:other", None), ("hf:mine", Path("here")), ("cifar100", None)]


def test_own_public_data_in_any_form() -> None:
    inputs, labels = torch.arange(40.0).reshape(10, 4), torch.arange(10) % 3
    for public in (inputs, inputs.double().numpy(), (inputs, labels), Samples(inputs, labels)):
        federation = from_arrays([(inputs, labels)], (inputs, labels), public=public)
        assert federation.public is not None
        assert federation.public.inputs.dtype == torch.float32
        assert torch.equal(federation.public.inputs.sort(0).values, inputs)
        assert not torch.equal(federation.public.inputs, inputs), "it may come sorted"
    with pytest.raises(FedhmError, match=r"the public set has inputs of shape \(5,\)"):
        from_arrays([(inputs, labels)], (inputs, labels), public=torch.zeros(10, 5))
    with pytest.raises(FedhmError, match="inputs and labels of the public set must be arrays of numbers"):
        from_arrays([(inputs, labels)], (inputs, labels), public=np.array(["one", "two"]))


def test_public_samples_are_fed_with_their_numbers_and_as_they_are(federation: Federation) -> None:
    moving = replace(federation.preprocessing, crop=2, flip=True)
    feed = replace(federation, public=federation.clients[1], preprocessing=moving).public_feed()
    assert feed is not None
    inputs, rows = next(feed.shuffled(20, torch.Generator().manual_seed(0)))
    plain, numbers = next(feed.ordered(20))
    assert numbers.tolist() == list(range(20))
    assert torch.equal(inputs, plain[rows])
    assert federation.public_feed() is None


def test_public_inputs_are_part_of_what_identifies_a_run(federation: Federation) -> None:
    def of(public: Samples | None) -> str:
        return fingerprint(small_config(), {}, replace(federation, public=public))

    first, second = federation.clients[:2]
    relabelled = Samples(first.inputs, torch.zeros_like(first.labels))
    assert of(None) == fingerprint(small_config(), {}, federation)
    assert len({of(None), of(first), of(second)}) == 3
    assert of(relabelled) == of(first)


@pytest.mark.usefixtures("without_figures")
def test_fedhm_run_takes_public_data(federation: Federation, tmp_path: Path) -> None:
    settings = {"train": {"rounds": 1}, "engine": {"threads": 1}}
    arguments = (small_model(), federation.clients, federation.test, settings, tmp_path)
    fedhm.run(*arguments, public=federation.test.inputs)
    fedhm.run(*arguments, public=federation.test)
    with pytest.raises(FedhmError, match="belongs to another run, with other settings, data"):
        fedhm.run(*arguments)

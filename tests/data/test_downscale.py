"""Downscaled images are means of blocks, for training, testing, public samples and the costs of a model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhm.assembly import named_design, read_federation
from fedhm.config.loading import load_config
from fedhm.config.schema import DataConfig
from fedhm.data.federation import load_federation
from fedhm.data.images import downscale, downscale_source
from fedhm.data.samples import Samples, channel_statistics
from fedhm.data.sources import SOURCES, NamedSource, read_source
from fedhm.errors import FedhmError


def images(count: int, channels: int, height: int, width: int) -> Samples:
    pixels = torch.randint(0, 256, (count, channels, height, width), generator=torch.Generator().manual_seed(0))
    return Samples(pixels.byte(), torch.arange(count) % 3)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_each_pixel_is_the_rounded_mean_of_its_block(factor: int, channels: int, height: int, width: int) -> None:
    samples = images(2, channels, height * factor, width * factor)
    found = downscale(samples, factor)
    assert found.are_images
    assert torch.equal(found.labels, samples.labels)
    for image, small in zip(samples.inputs.numpy(), found.inputs.numpy(), strict=True):
        for channel, row, column in np.ndindex(small.shape):
            rows, columns = (slice(place * factor, (place + 1) * factor) for place in (row, column))
            mean = image[channel, rows, columns].astype(float).mean()
            assert small[channel, row, column] == int(mean + 0.5)  # a half is rounded up


def test_memory_in_channels_last_gives_the_same_pixels() -> None:
    samples = images(3, 3, 4, 6)
    turned = replace(samples, inputs=samples.inputs.contiguous(memory_format=torch.channels_last))
    assert torch.equal(downscale(turned, 2).inputs, downscale(samples, 2).inputs)


def test_a_factor_of_one_leaves_a_source_alone() -> None:
    source = read_source("digits", None)
    assert downscale_source(source, 1) is source


def test_train_test_and_public_samples_shrink_and_are_normalised_as_they_are_then() -> None:
    large = load_federation(DataConfig(public="digits", public_samples=50), 5, 0)
    small = load_federation(DataConfig(public="digits", public_samples=50, downscale=2), 5, 0)
    assert small.input_shape == (1, 4, 4)
    assert large.public is not None
    assert small.public is not None
    pairs = zip([*large.clients, large.test, large.public], [*small.clients, small.test, small.public], strict=True)
    for whole, shrunk in pairs:  # the same samples at the same clients
        assert torch.equal(downscale(whole, 2).inputs, shrunk.inputs)
        assert torch.equal(whole.labels, shrunk.labels)
    pixels = torch.cat([samples.inputs for samples in small.clients])
    assert (small.preprocessing.mean, small.preprocessing.std) == channel_statistics(pixels)


def test_costs_are_those_of_the_smaller_images_without_reading_any() -> None:
    config = load_config("cifar10-quick", ["data.downscale=2"])
    assert named_design(config).sample.shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("source", "factor", "sentence"),
    [
        ("digits", 3, r"data\.downscale = 3 does not divide images of 8×8 pixels"),
        ("digits", 16, r"data\.downscale = 16 does not divide images of 8×8 pixels"),
        ("diabetes", 2, r"data\.downscale = 2 is for images, and inputs of shape \(10,\) are none"),
        ("floats", 2, r"data\.downscale = 2 is for images in whole numbers, not for torch\.float32"),
    ],
)
def test_what_cannot_shrink_is_one_sentence(
    source: str, factor: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = read_source("digits", None)
    floats = replace(digits, train=Samples(digits.train.inputs.float(), digits.train.labels))
    monkeypatch.setitem(SOURCES, "floats", NamedSource(lambda _: floats))
    changes = [f"data.source={source}", f"data.downscale={factor}"]
    with pytest.raises(FedhmError, match=sentence):
        read_federation(load_config("digits", changes))

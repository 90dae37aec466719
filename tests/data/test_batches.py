"""Batches are what a plain loop over images would give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.data.samples import Feed, Preprocessing, Samples, channel_statistics


def images(count: int, channels: int = 3, height: int = 5, width: int = 7) -> Samples:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)
    return Samples(pixels, torch.arange(count))


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 40), size=st.integers(2, 16), seed=st.integers(0, 3))
def test_an_epoch_holds_every_sample_once_and_never_a_lone_last_one(count: int, size: int, seed: int) -> None:
    feed = Feed(images(count), Preprocessing((0.5,) * 3, (0.25,) * 3, crop=1, flip=True))
    batches = list(feed.shuffled(size, torch.Generator().manual_seed(seed)))
    labels = torch.cat([targets for _, targets in batches])
    assert sorted(labels.tolist()) == list(range(count))
    assert all(len(targets) <= size + 1 for _, targets in batches)
    assert count == 1 or all(len(targets) > 1 for _, targets in batches)


def test_every_augmented_image_is_a_window_of_its_padded_original_perhaps_mirrored() -> None:
    samples = images(30)
    feed = Feed(samples, Preprocessing((0.0,) * 3, (1 / 255,) * 3, crop=2, flip=True))  # keeps 0…255 as they are
    mirrored = 0
    for inputs, targets in feed.shuffled(8, torch.Generator().manual_seed(1)):
        for image, number in zip(inputs, targets, strict=True):
            padded = torch.nn.functional.pad(samples.inputs[number].float(), (2, 2, 2, 2))
            windows = padded.unfold(1, 5, 1).unfold(2, 7, 1)  # (C, 5, 5, H, W)
            straight = (windows == image[:, None, None]).all(dim=(0, 3, 4)).any()
            flipped = (windows == image.flip(2)[:, None, None]).all(dim=(0, 3, 4)).any()
            assert straight or flipped
            mirrored += int(flipped and not straight)
    assert 5 < mirrored < 25


def test_plain_batches_are_in_order_and_normalised() -> None:
    samples = images(5)
    mean, std = channel_statistics(samples.inputs)
    inputs = torch.cat([batch for batch, _ in Feed(samples, Preprocessing(mean, std, 2, True)).ordered(2)])
    scaled = samples.inputs.float() / 255
    expected = (scaled - scaled.mean((0, 2, 3))[:, None, None]) / scaled.std((0, 2, 3), correction=0)[:, None, None]
    torch.testing.assert_close(inputs, expected, rtol=1e-5, atol=1e-5)
    assert inputs[:2].is_contiguous(memory_format=torch.channels_last)


def test_other_input_is_passed_as_it_is() -> None:
    samples = Samples(torch.randn(6, 3), torch.zeros(6, dtype=torch.int64))
    feed = Feed(samples, Preprocessing(crop=4, flip=True))
    assert torch.equal(torch.cat([batch for batch, _ in feed.ordered(4)]), samples.inputs)


@pytest.mark.parametrize("augmentation", [(0, False), (0, True), (2, False), (2, True)])
def test_how_images_lie_in_memory_does_not_matter(augmentation: tuple[int, bool]) -> None:
    first = images(20)
    second = first.subset(torch.arange(20))
    assert second.inputs.permute(0, 2, 3, 1).is_contiguous()
    assert not first.inputs.permute(0, 2, 3, 1).is_contiguous()
    drawn = []
    for samples in (first, second):
        feed = Feed(samples, Preprocessing((0.1, 0.2, 0.3), (0.3, 0.2, 0.1), *augmentation))
        drawn.append([inputs for inputs, _ in feed.shuffled(8, torch.Generator().manual_seed(2))])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    assert all(a.is_contiguous(memory_format=torch.channels_last) for a in drawn[0])

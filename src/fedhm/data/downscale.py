"""Smaller images: the mean of every block of k × k pixels in place of the block."""

from dataclasses import replace

import torch

from fedhm.data.samples import Samples, Source, channel_statistics
from fedhm.errors import FedhmError


def downscaled_source(source: Source, factor: int) -> Source:
    """Return a data set whose images have a `factor`-th of their height and width.

    Means of pixels vary less than pixels do, so the images are normalised by what they are now.
    """
    if factor == 1:
        return source
    train, test = downscaled(source.train, factor), downscaled(source.test, factor)
    mean, std = channel_statistics(train.tensor)
    return replace(source, train=train, test=test, mean=mean, std=std)


def downscaled(samples: Samples, factor: int) -> Samples:
    """Return images (N, C, H, W) as (N, C, H/k, W/k), each pixel the rounded mean of a block, a half rounded up."""
    if factor == 1:
        return samples
    count, *shape = samples.inputs.shape
    smaller = downscaled_shape(tuple(shape), factor)
    if not samples.are_images:
        raise FedhmError(f"data.downscale = {factor} is for images in whole numbers, not for {samples.inputs.dtype}")
    # pixel by pixel of the blocks, so that no copy of the data set as larger numbers is made
    sums = torch.full((count, *smaller), factor**2 // 2, dtype=torch.int32)
    for row in range(factor):
        for column in range(factor):
            sums += samples.tensor[:, :, row::factor, column::factor]
    return Samples(sums.div_(factor**2, rounding_mode="floor").to(torch.uint8), samples.labels)


def downscaled_shape(shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Return the shape that inputs of `shape` have after downscaling, without looking at them."""
    if factor == 1:
        return shape
    if len(shape) != 3:
        raise FedhmError(f"data.downscale = {factor} is for images, and inputs of shape {shape} are none")
    channels, height, width = shape
    if height % factor or width % factor:
        raise FedhmError(f"data.downscale = {factor} does not divide images of {height}×{width} pixels")
    return channels, height // factor, width // factor

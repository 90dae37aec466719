import numpy as np
import torch

from fedhm.data.images import read_digits


def test_every_digit_is_there_once_and_scaled_to_bytes() -> None:
    source = read_digits()
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    expected = sorted(
        (int(label), bytes(round(value * 255 / 16) for value in image.astype(int).tolist()))
        for image, label in zip(pixels, labels, strict=True)
    )
    found = sorted(
        (int(label), image.numpy().tobytes())
        for part in (source.train, source.test)
        for image, label in zip(part.inputs, part.labels, strict=True)
    )
    assert found == expected
    assert len(found) == 1797


def test_shapes_and_types() -> None:
    source = read_digits()
    assert source.classes == 10
    for part in (source.train, source.test):
        assert part.inputs.shape[1:] == (1, 8, 8)
        assert part.inputs.dtype == torch.uint8
        assert part.inputs.is_contiguous()
        assert part.labels.dtype == torch.int64
    assert source.train.inputs.max() == 255
    assert 0.25 < source.mean[0] < 0.35
    assert len(source.std) == 1


def test_one_in_five_of_every_label_is_for_testing() -> None:
    source = read_digits()
    train, test = (torch.bincount(part.labels, minlength=10) for part in (source.train, source.test))
    assert torch.equal(test, (train + test) // 5)


def test_the_split_is_the_same_every_time() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = read_digits()
    torch.manual_seed(2)
    np.random.seed(2)
    second = read_digits()
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert torch.equal(first.train.labels, second.train.labels)

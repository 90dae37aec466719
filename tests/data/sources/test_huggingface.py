import io
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedhm.data.huggingface import read_huggingface
from fedhm.errors import FedhmError

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="there is no package datasets here")


@pytest.fixture(scope="module")
def datasets() -> Any:
    """The package, imported by who runs a test of it: it takes seconds, in every process that only collects them."""
    return import_module("datasets")


GREY = [np.full((2, 3), value, np.uint8) for value in (0, 7, 255)]
COLOUR = [np.arange(start, start + 18, dtype=np.uint8).reshape(2, 3, 3) for start in (0, 50, 200)]


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def stored(images: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    return [{"bytes": png(pixels), "path": None} for pixels in images]


def write(path: Path, images: Sequence[Any], **columns: Any) -> None:
    """A parquet file as other programs write it, without the metadata of `datasets`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if images and isinstance(images[0], np.ndarray):
        images = stored(images)
    pq.write_table(pa.table({"image": images, **columns}), path)


def write_both(folder: Path, images: Sequence[Any], **columns: Any) -> None:
    for name in ("train.parquet", "test.parquet"):
        write(folder / name, images, **columns)


def test_greyscale_images_keep_one_channel(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00001.parquet", GREY, label=[2, 0, 1])
    write(tmp_path / "test-00000-of-00001.parquet", GREY[:2], label=[1, 1])
    source = read_huggingface("mnist", tmp_path)
    assert source.train.inputs.shape == (3, 1, 2, 3)
    assert source.train.inputs.dtype == torch.uint8
    assert source.train.inputs.is_contiguous()
    assert source.train.labels.dtype == torch.int64
    assert torch.equal(source.train.inputs[:, 0], torch.from_numpy(np.stack(GREY)))
    assert source.train.labels.tolist() == [2, 0, 1]
    assert source.test.labels.tolist() == [1, 1]
    assert source.classes == 3
    assert source.mean == pytest.approx([(0 + 7 + 255) / 3 / 255])


def test_files_with_the_features_of_datasets(datasets: Any, tmp_path: Path) -> None:
    features = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=["a", "b", "c", "d"])})
    for name, labels in (("train", [3, 0, 3]), ("validation", [1, 2, 3])):
        images = [Image.fromarray(pixels) for pixels in COLOUR]
        split = datasets.Dataset.from_dict({"img": images, "fine": labels}, features=features)
        split.to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    source = read_huggingface("org/name", tmp_path)
    assert source.classes == 4  # the features name four, though training shows only two
    assert source.train.labels.tolist() == [3, 0, 3]
    assert source.test.labels.tolist() == [1, 2, 3]
    assert torch.equal(source.train.inputs, torch.from_numpy(np.stack(COLOUR)).permute(0, 3, 1, 2))
    assert source.train.inputs.is_contiguous()
    assert len(source.mean) == len(source.std) == 3


def test_string_labels_are_sorted_and_shards_are_joined_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train-1.parquet", GREY[1:], label=["cat", "ant"])
    write(tmp_path / "train-0.parquet", GREY[:1], label=["dog"])
    write(tmp_path / "TEST.parquet", GREY[:1], label=["cat"])
    source = read_huggingface("pets", tmp_path)
    assert source.train.labels.tolist() == [2, 1, 0]
    assert source.train.inputs[:, 0, 0, 0].tolist() == [0, 7, 255]
    assert source.test.labels.tolist() == [1]
    assert source.classes == 3


def test_integers_with_gaps_become_class_numbers(tmp_path: Path) -> None:
    write_both(tmp_path, GREY, kind=[-5, 1000, 20])
    source = read_huggingface("gaps", tmp_path)
    assert source.train.labels.tolist() == [0, 2, 1]
    assert source.classes == 3


def test_one_coloured_image_makes_all_coloured(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", GREY, label=[0, 1, 2])
    write(tmp_path / "test.parquet", COLOUR, label=[0, 1, 2])
    source = read_huggingface("mixed", tmp_path)
    assert source.train.inputs.shape == (3, 3, 2, 3)
    for channel in range(3):
        assert torch.equal(source.train.inputs[:, channel], torch.from_numpy(np.stack(GREY)))


def test_transparent_and_palette_images_become_rgb(tmp_path: Path) -> None:
    images = []
    for mode in ("RGBA", "P"):
        file = io.BytesIO()
        Image.new("RGB", (3, 2), (255, 0, 51)).convert(mode).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": None})
    write_both(tmp_path, images, label=[0, 1])
    source = read_huggingface("modes", tmp_path)
    assert source.train.inputs.shape == (2, 3, 2, 3)
    assert source.train.inputs[:, :, 0, 0].tolist() == [[255, 0, 51]] * 2


def test_an_image_stored_as_a_path_is_opened(tmp_path: Path) -> None:
    (tmp_path / "seven.png").write_bytes(png(GREY[1]))
    write_both(tmp_path, [{"bytes": None, "path": str(tmp_path / "seven.png")}], label=[0])
    assert read_huggingface("paths", tmp_path).test.inputs.unique().tolist() == [7]


def test_test_files_go_before_validation_files(tmp_path: Path) -> None:
    for number, name in enumerate(("train", "validation", "test")):
        write(tmp_path / f"{name}.parquet", [GREY[number]], label=[0])
    assert read_huggingface("three", tmp_path).test.inputs.unique().tolist() == [255]


def test_a_configuration_is_a_folder(tmp_path: Path) -> None:
    write_both(tmp_path / "small", GREY[:1], label=[0])
    write_both(tmp_path, GREY, label=[0, 1, 2])
    assert len(read_huggingface("org/name@small", tmp_path).train) == 1
    with pytest.raises(FedhmError, match=r"there are no parquet files in .*large"):
        read_huggingface("org/name@large", tmp_path)


def test_of_several_class_labels_the_fine_one_is_learnt(datasets: Any, tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "fine_label": datasets.ClassLabel(num_classes=100),
            "coarse_label": datasets.ClassLabel(num_classes=20),
        }
    )
    rows = {"img": [Image.fromarray(COLOUR[0])], "fine_label": [77], "coarse_label": [5]}
    for name in ("train", "test"):
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    source = read_huggingface("cifar100", tmp_path)
    assert source.train.labels.tolist() == [77]
    assert source.classes == 100


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_both(tmp_path / "data", GREY, label=[0, 1, 2])
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    read_huggingface("mnist", tmp_path)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert len(list((tmp_path / "data").iterdir())) == 2


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"weight": [0.5, 1.0, 2.0]}, "hf:x has no column that could be the label"),
        ({"a": [0, 1, 2], "b": [0, 1, 2]}, "several columns that could be the label: a, b"),
        ({"label": [0, 1, 2], "target": [0, 1, 2]}, "several columns that could be the label: label, target"),
        ({"label": [0, None, 2]}, "has training samples without a label"),
        ({"label": [0, 1, 2], "image": ["a", "b", "c"]}, "has no column that could be the image"),
        (
            {"label": [0, 1, 2], "image": ["", "", ""], "left": stored(GREY), "right": stored(GREY)},
            "several columns that could be the image: left, right",
        ),
    ],
)
def test_columns_that_do_not_tell(tmp_path: Path, columns: dict[str, Any], sentence: str) -> None:
    for name in ("train", "test"):
        pq.write_table(pa.table({"image": stored(GREY), **columns}), tmp_path / f"{name}.parquet")
    with pytest.raises(FedhmError, match=sentence):
        read_huggingface("x", tmp_path)


@pytest.mark.parametrize("strange", [3, None])
def test_a_test_label_that_training_never_shows(tmp_path: Path, strange: int | None) -> None:
    write(tmp_path / "train.parquet", GREY, label=[0, 1, 2])
    write(tmp_path / "test.parquet", GREY, label=[0, strange, 2])
    with pytest.raises(FedhmError, match=f"the label {strange}, which is not one of the 3 classes"):
        read_huggingface("x", tmp_path)


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ({"bytes": b"not a picture", "path": None}, "image in row 1 that cannot be decoded"),
        ({"bytes": png(COLOUR[1])[:45], "path": None}, "image in row 1 that cannot be decoded"),
        ({"bytes": None, "path": "no/such/file.png"}, "image in row 1 that cannot be decoded"),
        ({"bytes": None, "path": None}, "no image in row 1"),
        (None, "no image in row 1"),
        (
            {"bytes": png(np.full((2, 3), 1000, np.uint16)), "path": None},
            "more than 8 bits a channel in row 1",
        ),
        (
            {"bytes": png(np.zeros((4, 5), np.uint8)), "path": None},
            "images of several sizes, 3×2 and 5×4 pixels; all must be of one size",
        ),
    ],
)
def test_images_that_cannot_be_used(tmp_path: Path, image: dict[str, Any] | None, sentence: str) -> None:
    write_both(tmp_path, [{"bytes": png(GREY[0]), "path": "first.png"}, image], label=[0, 1])
    with pytest.raises(FedhmError, match=sentence):
        read_huggingface("x", tmp_path)


@pytest.mark.parametrize("names", [["train"], ["test"], ["one", "two"]])
def test_files_whose_names_do_not_tell(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write(tmp_path / f"{name}.parquet", GREY, label=[0, 1, 2])
    with pytest.raises(FedhmError, match="with 'train' in their names, and others with 'test' or 'validation'"):
        read_huggingface("x", tmp_path)


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(FedhmError, match=r"there are no parquet files in .*none or .*none.data"):
        read_huggingface("x", tmp_path / "none")


def test_a_split_without_samples(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    split = datasets.Dataset.from_dict({"image": stored(GREY), "label": [0, 1, 2]})
    splits = datasets.DatasetDict({"train": split, "test": split.select([])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)
    with pytest.raises(FedhmError, match="no samples in its split test"):
        read_huggingface("x")


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(FedhmError, match=r"hf:x cannot be loaded: .*Parquet.*\. Check the parquet files in "):
        read_huggingface("x", tmp_path)


def test_the_hub_is_asked_for_name_and_configuration(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    split = datasets.Dataset.from_dict({"image": stored(GREY), "label": [0, 1, 2]})

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return datasets.DatasetDict({"train": split, "valid": split})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read_huggingface("org/name@small").test) == 3
    read_huggingface("org/name")
    no_scripts = {"trust_remote_code": False}
    assert asked == [(("org/name", "small"), no_scripts), (("org/name", None), no_scripts)]


def test_a_data_set_without_a_test_split(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    split = datasets.Dataset.from_dict({"image": stored(GREY), "label": [0, 1, 2]})
    splits = datasets.DatasetDict({"train": split, "extra": split})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)
    with pytest.raises(FedhmError, match="no split called test or validation or valid or val; it has train, extra"):
        read_huggingface("x")


def test_a_test_split_without_labels(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    split = datasets.Dataset.from_dict({"image": stored(GREY), "label": [0, 1, 2]})
    splits = datasets.DatasetDict({"train": split, "test": split.remove_columns("label")})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)
    with pytest.raises(FedhmError, match="has the column 'label' for training but not for testing"):
        read_huggingface("x")


def test_a_class_label_without_a_class(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=2)})
    rows = {"image": [Image.fromarray(GREY[0])], "label": [-1]}  # the hub's way to keep test labels secret
    split = datasets.Dataset.from_dict(rows, features=features)
    splits = datasets.DatasetDict({"train": split, "test": split})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: splits)
    with pytest.raises(FedhmError, match="the label -1, which is not one of the 2 classes to learn"):
        read_huggingface("x")


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FedhmError, match=r"hf:no-such/data-set cannot be loaded: .* Check the name and the network"):
        read_huggingface("no-such/data-set")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FedhmError, match=r"needs the package datasets: pip install '\.\[hf\]'"):
        read_huggingface("mnist")


@pytest.mark.parametrize("name", ["", "@config"])
def test_no_name(name: str) -> None:
    with pytest.raises(FedhmError, match="must be followed by the name of a data set"):
        read_huggingface(name)

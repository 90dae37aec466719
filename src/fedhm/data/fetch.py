"""Fetches image data sets from Hugging Face, and writes them in the layouts that `fedhm.data.images` reads."""

import gzip
import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhm.data.huggingface import TEST, TRAIN, convert, find_split, load_splits
from fedhm.data.images import CIFAR10, CIFAR100, FOLDER, PARTS, Layout, idx_names
from fedhm.data.samples import Samples, Source, channel_statistics
from fedhm.data.sources import SOURCES
from fedhm.errors import FedhmError
from fedhm.machine.extras import how_to_install
from fedhm.machine.files import make_folder, take_lock, write_atomically

if TYPE_CHECKING:
    import datasets

TIMEOUT = 10.0  # seconds until a hub that does not answer counts as out of reach
COMPRESSION = 6  # of gzip: 9 takes four times as long and saves one part in a hundred

# the superclass of each of CIFAR-100's classes, which its official files hold beside the class
COARSE = np.array([
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
], np.uint8)  # fmt: skip

Say = Callable[[str], object]
Write = Callable[["datasets.DatasetDict", str, Path, Say], None]


@dataclass(frozen=True)
class Fetched:
    """A data set that can be fetched."""

    hub: str  # its name on Hugging Face
    write: Write  # writes its splits, as fetched from a name, into a folder
    layout: str  # the files that the loader expects in a folder, as part of a sentence
    mean: tuple[float, ...]  # of each channel of the training images, as published: tells whether they are the same


def fetch(name: str, folder: Path, source: str = "", say: Say = print) -> None:
    """Fetch a data set into `folder`, where it is either complete or not there.

    source  another name on Hugging Face, or a folder of parquet files; empty: the usual one, whose content is checked
    """
    wanted = FETCHED[name]
    files = SOURCES[name].files
    assert files is not None
    if files.are_in(folder):
        raise FedhmError(f"{folder} holds files of {name} already: remove them first, or name another folder with --to")
    local = Path(source) if source and Path(source).is_dir() else None
    hub = source or wanted.hub
    by_hand = f"put {wanted.layout} into {folder} yourself ({files.how_to_get})"
    if local is None:
        _check_reach(name, hub, by_hand)
    make_folder(folder)
    with _workshop(folder, name) as work:
        say(f"fetching {hub} …")
        with load_splits(hub, local, f"Or {by_hand}.", verification_mode="all_checks") as splits:
            wanted.write(splits, hub, work, say)
        say("reading all of it again …")
        read = SOURCES[name].read(work)
        if not source:
            _check_content(name, wanted, read)
        sums = "".join(f"{_sha256(file)}  {file.relative_to(work).as_posix()}\n" for file in _files_in(work))
        for made in sorted(work.iterdir()):
            made.rename(folder / made.name)
    write_atomically(folder / f"{name}.sha256", sums)
    say(
        f"{folder} holds {name}: {len(read.train):,} training and {len(read.test):,} test samples of {read.classes} "
        f"classes; 'sha256sum -c {name}.sha256' checks its files there"
    )


def _check_reach(name: str, hub: str, instead: str) -> None:
    """Raise unless Hugging Face answers for a data set: `datasets` itself would try for minutes."""
    if find_spec("datasets") is None:
        raise FedhmError(f"{name} cannot be fetched without the package datasets: {how_to_install('hf')}; or {instead}")
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return  # the user has it in the cache of `datasets`
    try:
        HfApi().dataset_info(hub, timeout=TIMEOUT)
    except Exception as error:  # errors of the hub and of its HTTP library, which changed, have no common class
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise FedhmError(
            f"{name} cannot be fetched, because {constants.ENDPOINT} does not give {hub} ({reason}): connect to the "
            f"network and try again, or {instead}"
        ) from None


@contextmanager
def _workshop(folder: Path, name: str) -> Iterator[Path]:
    """Yield a folder inside `folder` to write into, which is gone afterwards. Only one process fetches at a time."""
    work = folder / f".fetching-{name}"
    lock = take_lock(folder / f".fetching-{name}.lock")
    if lock is None:
        raise FedhmError(f"another process is fetching {name} into {folder}")
    try:
        shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
        work.mkdir()
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _check_content(name: str, wanted: Fetched, read: Source) -> None:
    """Raise unless the samples are those that were published: their number of each class, and their mean colour."""
    known = SOURCES[name]
    counts = np.bincount(read.train.labels.numpy(), minlength=known.outputs)
    if set(counts.tolist()) != {known.train_samples // known.outputs}:
        raise FedhmError(
            f"{wanted.hub} is not {name} as published: it has {len(read.train):,} training samples, {counts.min()} to "
            f"{counts.max()} of each class; name another source with --from"
        )
    mean, _ = channel_statistics(read.train.tensor)
    if max(abs(a - b) for a, b in zip(mean, wanted.mean, strict=True)) > 0.005:
        found = ", ".join(f"{value:.4f}" for value in mean)
        raise FedhmError(
            f"{wanted.hub} is not {name} as published: the mean of its channels is {found}, not "
            f"{', '.join(map(str, wanted.mean))}; name another source with --from"
        )


def _files_in(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write_file(path: Path, content: bytes, say: Say) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    say(f"{path.name}: {len(content):,} bytes")


def _cifar_writer(layout: Layout) -> Write:
    """Write rows of label bytes and 3 × 32 × 32 pixels; training samples are divided over the layout's files."""

    def rows(samples: Samples) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        labels = samples.labels.numpy().astype(np.uint8)
        columns = [labels] if layout.label_bytes == 1 else [COARSE[labels], labels]
        return np.concatenate([np.stack(columns, 1), samples.tensor.flatten(1).numpy()], axis=1)

    def write(splits: "datasets.DatasetDict", hub: str, folder: Path, say: Say) -> None:
        say("decoding images …")
        source = convert(hub, splits)
        if source.classes > layout.classes or source.train.inputs.shape[1:] != (3, 32, 32):
            raise FedhmError(f"{hub} has {_kind(source)}, not 3×32×32 pixels of {layout.classes} classes")
        for samples, names in ((source.train, layout.train), (source.test, layout.test)):
            for name, part in zip(names, np.array_split(rows(samples), len(names)), strict=True):
                _write_file(folder / layout.folder / name, part.tobytes(), say)

    return write


def _write_idx(splits: "datasets.DatasetDict", hub: str, folder: Path, say: Say) -> None:
    say("decoding images …")
    source = convert(hub, splits)
    if source.classes > 10 or source.train.inputs.shape[1:] != (1, 28, 28):
        raise FedhmError(f"{hub} has {_kind(source)}, not 1×28×28 pixels of 10 classes")
    for samples, part in zip((source.train, source.test), PARTS, strict=True):
        arrays = (samples.tensor[:, 0].numpy(), samples.labels.numpy().astype(np.uint8))
        for name, array in zip(idx_names(part), arrays, strict=True):
            header = struct.pack(f">HBB{array.ndim}I", 0, 0x08, array.ndim, *array.shape)
            packed = gzip.compress(header + array.tobytes(), COMPRESSION, mtime=0)
            _write_file(folder / f"{name}.gz", packed, say)


def _kind(source: Source) -> str:
    return f"images of {'×'.join(map(str, source.train.inputs.shape[1:]))} pixels of {source.classes} classes"


def _write_tiny_imagenet(splits: "datasets.DatasetDict", hub: str, folder: Path, say: Say) -> None:
    """Write the images as they are encoded, each in the folder of its class, which its label's name says."""
    import datasets

    train, test = (find_split(hub, splits, words) for words in (TRAIN, TEST))
    label = train.features.get("label")
    if not isinstance(label, datasets.ClassLabel) or "image" not in train.features:
        raise FedhmError(f"{hub} needs a column 'image', and a column 'label' whose classes are WordNet numbers")
    root = folder / FOLDER
    for wnid in label.names:
        if Path(wnid).name != wnid:
            raise FedhmError(f"{hub} has a class of the name {wnid!r}, which is no WordNet number")
        (root / "train" / wnid / "images").mkdir(parents=True)
    (root / "val" / "images").mkdir(parents=True)
    annotations = []
    for split, part in ((train, "train"), (test, "val")):
        images = split.select_columns(["image", "label"]).cast_column("image", datasets.Image(decode=False))
        for number, row in enumerate(images):
            if number % 10_000 == 0:
                say(f"{part}: image {number:,} of {len(images):,}")
            wnid, content = label.names[row["label"]], row["image"]["bytes"]
            if content is None:
                content = Path(row["image"]["path"]).read_bytes()
            if part == "train":
                place = root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            else:
                place = root / "val" / "images" / f"val_{number}.JPEG"
                annotations.append(f"{place.name}\t{wnid}\t0\t0\t63\t63\n")
            place.write_bytes(content)
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in label.names), encoding="utf-8")
    (root / "val" / "val_annotations.txt").write_text("".join(annotations), encoding="utf-8")


FETCHED: dict[str, Fetched] = {
    "cifar10": Fetched(
        "uoft-cs/cifar10",
        _cifar_writer(CIFAR10),
        "cifar-10-batches-bin/data_batch_1.bin to data_batch_5.bin and cifar-10-batches-bin/test_batch.bin",
        (0.4914, 0.4822, 0.4465),
    ),
    "cifar100": Fetched(
        "uoft-cs/cifar100",
        _cifar_writer(CIFAR100),
        "cifar-100-binary/train.bin and cifar-100-binary/test.bin",
        (0.5071, 0.4865, 0.4409),
    ),
    "fashion-mnist": Fetched(
        "zalando-datasets/fashion_mnist",
        _write_idx,
        "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
        "t10k-labels-idx1-ubyte.gz",
        (0.2860,),
    ),
    "tinyimagenet": Fetched(
        "zh-plus/tiny-imagenet",
        _write_tiny_imagenet,
        f"{FOLDER}/wnids.txt, {FOLDER}/train/WNID/images/*.JPEG, {FOLDER}/val/images/*.JPEG and "
        f"{FOLDER}/val/val_annotations.txt",
        (0.4802, 0.4481, 0.3975),
    ),
}

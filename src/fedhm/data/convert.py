"""Converts users' data to samples: arrays, tables, data sets, loaders, text. docs/data.md lists what is taken."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from fedhm.config.objective import Objective
from fedhm.data.columns import Columns
from fedhm.data.items import (
    PAIRS,
    as_inputs,
    as_target,
    as_tensor,
    frame_columns,
    is_array,
    is_frame,
    label_column,
    only_or_all,
    split_item,
)
from fedhm.data.lazy import LazyInputs
from fedhm.data.samples import Samples
from fedhm.data.text import TEXT_COLUMNS, TextReader, to_text
from fedhm.data.tokens import IDS
from fedhm.errors import FedhmError
from fedhm.machine.memory import lacks_memory
from fedhm.networks.inputs import Inputs, map_tensors, tensors_of
from fedhm.seeds import numpy_generator

# One client's data: samples, a pair (inputs, labels) of arrays, a table, a mapping of columns, a list of pairs or of
# dicts, a map-style data set, or a loader of one. Text is a tokenizer's result with labels, a data set of Hugging Face
# or of dicts, or texts with labels.
DataLike = Samples | tuple[Any, Any] | Dataset[Any] | Mapping[str, Any] | list[Any] | DataLoader[Any]
PublicLike = DataLike | Tensor | np.ndarray[Any, Any]  # inputs may come without labels
SPLITS = {"train", "test", "validation", "valid", "val", "dev"}

Collate = Callable[[list[Any]], Any]


def to_samples(
    data: DataLike, whose: str, dtype: torch.dtype, objective: Objective, reader: TextReader | None = None
) -> Samples:
    """Return a user's samples; floating-point inputs are converted to `dtype`, and `reader` tokenizes texts."""
    try:
        return _to_samples(data, whose, dtype, objective, reader)
    except FedhmError:
        raise
    except Exception as error:  # a foreign object may raise anything while it is looked at
        if lacks_memory(error):
            raise
        raise FedhmError(f"{whose} cannot be read: {type(error).__name__}: {error}") from error


def _to_samples(
    data: DataLike, whose: str, dtype: torch.dtype, objective: Objective, reader: TextReader | None
) -> Samples:
    given, collate = _unwrapped(data, whose)
    text = None if collate else to_text(given, whose, objective.per_token, reader)
    if text is None and not collate and _has_named_rows(given, whose):
        text = to_text(_as_columns(_rows(given, whose), whose), whose, objective.per_token, reader)
    if text is not None:
        return Samples(text.tokens, objective.as_targets(text.labels, whose, dtype))
    if collate or _is_lazy(given):
        return _lazy_samples(given, whose, dtype, objective, collate)
    inputs, labels = _in_memory(given, whose)
    labels = _dense(labels, whose)
    inputs = map_tensors(lambda tensor: _converted(_dense(tensor, whose), dtype), inputs)
    _check_inputs(inputs, labels, whose)
    stored = inputs if isinstance(inputs, Tensor) else _columns(inputs)
    return Samples(stored, objective.as_targets(labels, whose, dtype))


def to_public_samples(data: PublicLike, dtype: torch.dtype) -> Samples:
    """Return public samples in random order: sorted ones would give BatchNorm batches of one label."""
    whose = "the public set"
    if isinstance(data, Tensor | np.ndarray):
        if not data.ndim:
            raise FedhmError("the public set must be an array of inputs, not a single number")
        data = (data, np.zeros(len(data)))
    given, collate = _unwrapped(data, whose)
    if collate:
        raise FedhmError("the public set is read into memory: give its data set, without a collate_fn")
    inputs = map_tensors(lambda tensor: _converted(_dense(tensor, whose), dtype), _in_memory(given, whose)[0])
    count = len(tensors_of(inputs)[0]) if tensors_of(inputs)[0].ndim else 0
    numbers = torch.zeros(count, dtype=torch.int64)
    _check_inputs(inputs, numbers, whose)
    samples = Samples(inputs if isinstance(inputs, Tensor) else _columns(inputs), numbers)
    return samples.subset(torch.from_numpy(numpy_generator(0, "public").permutation(len(samples))))


def check_clients(clients: Any) -> list[Any]:
    """Return the data of each client, from a list, or from a mapping by the clients' names."""
    wanted = "clients must be a list with an entry for each client"
    if isinstance(clients, Mapping):
        names = {str(name).lower() for name in clients}
        if names and names <= SPLITS:
            raise FedhmError(f"{wanted}, not a dictionary of the splits {', '.join(map(str, clients))}")
        if any(is_array(value) and not is_frame(value) for value in clients.values()):
            raise FedhmError(f"{wanted}, not one dictionary of arrays")
        clients = list(clients.values())
    if isinstance(clients, tuple) and len(clients) == 2 and hasattr(clients[0], "shape"):
        raise FedhmError(f"{wanted}, not one pair of arrays")
    one = isinstance(clients, Dataset | DataLoader | Samples | Tensor | np.ndarray | str) or is_frame(clients)
    if one or not hasattr(clients, "__iter__") or hasattr(clients, "column_names"):
        raise FedhmError(f"{wanted}, not a {type(clients).__name__}")
    found = list(clients)
    if not found:
        raise FedhmError("a federation needs at least one client")
    return found


def named_client_tests(tests: Mapping[str, DataLike | None], clients: Any) -> list[DataLike | None]:
    """Return the test sets of clients that are given by their names, in the clients' order."""
    if not isinstance(clients, Mapping):
        raise FedhmError("client_test is a dictionary, and clients is none: give both by name, or both as lists")
    if unknown := [str(name) for name in tests if name not in clients]:
        raise FedhmError(f"client_test names '{unknown[0]}', which is none of the clients")
    return [tests.get(name) for name in clients]


def named_weights(weights: Mapping[str, float], clients: Any) -> list[float]:
    """Return the weights of clients that are given by their names, in the clients' order."""
    if not isinstance(clients, Mapping):
        raise FedhmError("federation.weights is a dictionary, and clients is none: give both by name, or both as lists")
    if odd := [str(name) for name in (*weights, *clients) if name not in clients or name not in weights]:
        raise FedhmError(f"federation.weights and clients must have the same names: '{odd[0]}' is in one of them only")
    return [weights[name] for name in clients]


def _unwrapped(data: Any, whose: str) -> tuple[Any, Collate | None]:
    """Return the data set of a loader with its own collate_fn, and tables as arrays."""
    if isinstance(data, DataLoader):
        return _loaded(data, whose)
    if any(hasattr(part, "toarray") for part in (data if isinstance(data, tuple) else (data,))):
        raise FedhmError(f"{whose} has a sparse matrix: hand in matrix.toarray() in its place")
    if is_frame(data):
        return _table(frame_columns(data), whose), None
    if isinstance(data, tuple) and len(data) == 2 and any(is_frame(part) or hasattr(part, "to_numpy") for part in data):
        return (_table_inputs(data[0], whose), _table_labels(data[1], whose)), None
    if isinstance(data, Mapping) and data and {str(name).lower() for name in data} <= SPLITS:
        names = ", ".join(map(str, data))
        raise FedhmError(f"{whose} is a dictionary of the splits {names}: give one of them, such as data['train']")
    return data, None


def _loaded(loader: DataLoader[Any], whose: str) -> tuple[Any, Collate | None]:
    """Return a loader's data set. Its batches, order and workers are not used: `[train]` decides on batches."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return dataset, None  # refused below
    sampler = loader.sampler
    if isinstance(sampler, SubsetRandomSampler):
        dataset = Subset(dataset, list(sampler.indices))
    elif not (isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and _is_whole(sampler))):
        raise FedhmError(
            f"{whose} is a DataLoader with a {type(sampler).__name__}, which is not used: give its data set, or a "
            "torch.utils.data.Subset of it"
        )
    own = loader.collate_fn not in (default_collate, None) and loader.batch_size is not None
    if not own and loader.batch_size is None:
        raise FedhmError(f"{whose} is a DataLoader that makes no batches (batch_size=None): give its data set")
    return dataset, loader.collate_fn if own else None


def _is_whole(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


# ---- tables ----


def _table(columns: dict[str, Any], whose: str) -> Any:
    """Return the text columns of a table as they are, or a pair: a matrix of its numbers, and its labels."""
    if {IDS, *TEXT_COLUMNS} & set(columns):
        return columns
    label = label_column(list(columns), whose)
    return _matrix({name: column for name, column in columns.items() if name != label}, whose), columns[label]


def _table_inputs(part: Any, whose: str) -> Any:
    if not is_frame(part):
        return part.to_numpy() if hasattr(part, "to_numpy") else part
    columns = frame_columns(part)
    return columns if {IDS, *TEXT_COLUMNS} & set(columns) else _matrix(columns, whose)


def _table_labels(part: Any, whose: str) -> Any:
    if is_frame(part):
        matrix = _matrix(frame_columns(part), whose)
        return matrix[:, 0] if matrix.shape[1] == 1 else matrix
    return part.to_numpy() if hasattr(part, "to_numpy") else part


def _matrix(columns: Mapping[str, Any], whose: str) -> np.ndarray[Any, Any]:
    if not columns:
        raise FedhmError(f"{whose} is a table without columns")
    for name, column in columns.items():
        if column.dtype.kind not in "biuf":
            raise FedhmError(
                f"the column '{name}' of {whose} holds texts, dates, missing values or other objects: replace it by "
                "numbers, or leave it out"
            )
    return np.stack(list(columns.values()), 1)


# ---- data in memory ----


def _is_lazy(data: Any) -> bool:
    """Tell whether data is read when a batch needs it: every data set whose samples are not in memory as tensors."""
    if isinstance(data, Samples | tuple | list | Mapping) or _tensors_inside(data) is not None or is_array(data):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes)


def _tensors_inside(data: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors of a TensorDataset, or of a part of one; None for any other data."""
    if type(data) is TensorDataset:
        return data.tensors
    if type(data) is Subset and (inner := _tensors_inside(data.dataset)) is not None:
        chosen = torch.as_tensor(list(data.indices), dtype=torch.int64)
        return tuple(tensor[chosen] for tensor in inner)
    return None


def _in_memory(data: Any, whose: str) -> tuple[Inputs, Tensor]:
    """Return the inputs and labels of a user's data, as tensors (N, …)."""
    if isinstance(data, Samples):
        if isinstance(data.inputs, Columns):
            return data.inputs.batch(), data.labels
        if not isinstance(data.inputs, Tensor):
            raise FedhmError(f"{whose} must be samples in memory")
        return data.inputs, data.labels
    if (tensors := _tensors_inside(data)) is not None:
        if len(tensors) < 2:
            raise FedhmError(f"{whose} has inputs but no labels: TensorDataset(inputs, labels) has both")
        data = (tensors[0] if len(tensors) == 2 else tensors[:-1], tensors[-1])
    if isinstance(data, Mapping):
        label = label_column([str(name) for name in data], whose)
        data = (only_or_all({str(n): v for n, v in data.items() if str(n) != label}), data[label])
    if isinstance(data, tuple) and len(data) == 2:
        return _of_pair(data, whose)
    if is_array(data) or isinstance(data, Tensor | np.ndarray):
        raise FedhmError(f"{whose} is an array without labels: give a pair (inputs, labels)")
    if isinstance(data, list) and len(data) == 2 and all(map(is_array, data)):
        raise FedhmError(f"{whose} is a list of two arrays: give a pair, (inputs, labels)")
    rows = _rows(data, whose)
    if not rows:
        raise FedhmError(f"{whose} has no samples")
    if all(isinstance(row, Mapping) for row in rows):
        columns = {name: _stacked_rows(each, whose) for name, each in _as_columns(rows, whose).items()}
        return _in_memory(columns, whose)
    parts = [split_item(row, whose) for row in rows]
    several = isinstance(parts[0][0], tuple | Mapping)
    inputs = _several_rows([given for given, _ in parts], whose) if several else None
    stacked = _stacked_rows([given for given, _ in parts], whose) if inputs is None else inputs
    return stacked, _stacked_rows([target for _, target in parts], whose, targets=True)


def _of_pair(pair: tuple[Any, Any], whose: str) -> tuple[Inputs, Tensor]:
    try:
        return as_inputs(pair[0]), as_tensor(pair[1])
    except Exception as error:  # whatever a foreign array raises
        if lacks_memory(error):
            raise
        raise FedhmError(f"the inputs and labels of {whose} must be arrays of numbers: {error}") from None


def _several_rows(rows: list[Any], whose: str) -> Inputs | None:
    """Return several tensors for each sample; None if each is one, such as a tuple of numbers."""
    try:
        first = as_inputs(rows[0])
        if isinstance(first, Tensor):
            return None
        if isinstance(first, dict):
            return {name: _stacked_rows([row[name] for row in rows], whose) for name in first}
        return tuple(_stacked_rows(list(each), whose) for each in zip(*rows, strict=True))
    except FedhmError:
        raise
    except Exception as error:  # a user's samples may be anything
        raise FedhmError(f"the samples of {whose} must be {PAIRS}: {error!r}") from error


def _stacked_rows(rows: list[Any], whose: str, *, targets: bool = False) -> Tensor:
    """Return single samples as one tensor (N, …)."""
    try:
        tensors = [as_target(row) if targets else as_tensor(row) for row in rows]
    except Exception as error:  # a user's samples may be anything
        raise FedhmError(f"the samples of {whose} must be {PAIRS}: {error!r}") from error
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise FedhmError(f"the samples of {whose} differ in shape: bring them to one size first")
    try:
        return torch.stack(tensors)
    except (RuntimeError, TypeError) as error:
        raise FedhmError(f"the samples of {whose} differ in type: {error}") from None


def _rows(data: Any, whose: str) -> list[Any]:
    """Return all items of a map-style data set."""
    check_readable(data, whose)
    try:
        return [data[index] for index in range(len(data))]
    except Exception as error:  # a user's data set may raise anything
        raise FedhmError(f"the samples of {whose} must be {PAIRS}: {error!r}") from error


def check_readable(data: Any, whose: str) -> None:
    """Refuse data without a length, or without samples by index."""
    if isinstance(data, IterableDataset):
        raise FedhmError(
            f"{whose} is an IterableDataset, which has no samples by index: give a map-style data set, with "
            "__getitem__ and __len__"
        )
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, str | bytes | type):
        kind = type(data).__name__
        raise FedhmError(f"{whose} must be a pair (inputs, labels) or a dataset with a length, not a {kind}")
    if isinstance(data, tuple):
        raise FedhmError(f"{whose} must be a pair (inputs, labels), not a tuple of {len(data)}")


def _has_named_rows(data: Any, whose: str) -> bool:
    """Tell whether this is a data set of dicts with texts or tokens, which are read at once."""
    if isinstance(data, Samples | tuple | Mapping) or is_array(data):
        return False
    check_readable(data, whose)
    try:
        first = data[0] if len(data) else None
    except Exception as error:  # a user's data set may raise anything
        raise FedhmError(f"sample 0 of {whose} cannot be read: {error!r}") from error
    return isinstance(first, Mapping) and bool({IDS, *TEXT_COLUMNS} & {str(name) for name in first})


def _as_columns(rows: list[Any], whose: str) -> dict[str, list[Any]]:
    """Return the columns of a data set of dicts."""
    names = [str(name) for name in rows[0]]
    if any(not isinstance(row, Mapping) or set(row) != set(rows[0]) for row in rows):
        raise FedhmError(f"the samples of {whose} must all have the entries of the first, {', '.join(names)}")
    return {str(name): [row[name] for row in rows] for name in rows[0]}


# ---- data that is read when it is needed ----


def _lazy_samples(data: Any, whose: str, dtype: torch.dtype, objective: Objective, collate: Collate | None) -> Samples:
    check_readable(data, whose)
    try:
        count = len(data)
    except Exception as error:  # a user's data set may raise anything
        raise FedhmError(f"{whose} has no length: {error!r}") from error
    if not count:
        raise FedhmError(f"{whose} has no samples")
    inputs = LazyInputs(data, torch.arange(count), whose, dtype, objective, collate)
    labels = inputs.targets()
    inputs.warn_if_unrepeatable()
    return Samples(inputs, labels)


# ---- checks ----


def _check_inputs(inputs: Inputs, labels: Tensor, whose: str) -> None:
    """Refuse inputs that are not finite, and columns that differ in length."""
    for tensor in tensors_of(inputs):
        several = not isinstance(inputs, Tensor)
        if several and (not tensor.ndim or len(tensor) != (len(labels) if labels.ndim else 0)):
            raise FedhmError(
                f"{whose} has inputs of different lengths: got inputs "
                f"{', '.join(str(tuple(each.shape)) for each in tensors_of(inputs))} and labels {tuple(labels.shape)}"
            )
        wrong = ~tensor.isfinite() if tensor.is_floating_point() or tensor.is_complex() else None
        if wrong is not None and bool(wrong.any()):
            where = f", first in sample {int(wrong.flatten(1).any(1).nonzero()[0])}" if tensor.ndim > 1 else ""
            raise FedhmError(
                f"the inputs of {whose} hold NaN or infinite values{where}: leave these samples out, or replace them"
            )


def _columns(inputs: Inputs) -> Columns:
    if isinstance(inputs, dict):
        return Columns(inputs, named=True)
    assert isinstance(inputs, tuple)
    return Columns({str(number): tensor for number, tensor in enumerate(inputs)}, named=False)


def _dense(tensor: Tensor, whose: str) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise FedhmError(f"the inputs and labels of {whose} must be plain dense tensors: bring them to that form first")
    return tensor


def _converted(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs

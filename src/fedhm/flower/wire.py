"""Tasks and replies as Flower's records: one array for each tensor, the rest as JSON beside them. Nothing is pickled.

A message holds all of a client's tasks of one exchange, since an exchange takes seconds however little it carries.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedhm.config.loading import parse_resolved
from fedhm.config.schema import ResolvedConfig
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.machine.printable import printable
from fedhm.networks.exchange import Tensors
from fedhm.work.messages import Failure, Reply, Task, Update
from fedhm.work.work import work_of

NOTE = "fedhm"  # the record with all that is not a tensor
PARTS = ("tensors", "kept")
ELSEWHERE = {*PARTS, "position", "down", "up"}  # fields of a message that are no part of its values

UPDATE_VALUES = {field.name for field in fields(Update)} - ELSEWHERE

Records = dict[str, ArrayRecord | ConfigRecord]
Values = dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """What the server tells every client of the run; it comes with each message, since processes may live for one."""

    config: ResolvedConfig
    classes: int  # 0: not known yet, as the server asks what clients' inputs are like
    preprocessing: Preprocessing
    client_test: float = 0.0  # the share of its samples that a client holds out, if it brings no test samples
    base: str = ""  # what tells the frozen base, which does not travel, from others; "" where there is none

    def note(self) -> dict[str, str]:
        config = self.config.model_copy(update={"tracking": None})  # the server's alone, as are its paths
        said = {"config": config.to_toml(), "classes": self.classes, "preprocessing": asdict(self.preprocessing)}
        if self.client_test:
            said["client_test"] = self.client_test
        if self.base:
            said["base"] = self.base
        return {"terms": json.dumps(said)}

    @classmethod
    def read(cls, content: RecordDict) -> "Terms":
        return _terms(str(content.config_records[NOTE]["terms"]))


@lru_cache(maxsize=1)  # the same with every message
def _terms(text: str) -> Terms:
    values = json.loads(text)
    pixels = values["preprocessing"]
    pixels |= {"mean": tuple(pixels["mean"]), "std": tuple(pixels["std"])}
    config = parse_resolved(values["config"], "the server's config")
    share, base = values.get("client_test", 0.0), values.get("base", "")
    return Terms(config, values["classes"], Preprocessing(**pixels), share, base)


def greeting(terms: Terms) -> RecordDict:
    """Return a message that asks a node who it is."""
    return RecordDict({NOTE: ConfigRecord({**terms.note()})})


class Outbox:
    """The messages to clients in one exchange. A record that several get is made once, and Flower uploads it once."""

    def __init__(self, terms: Terms, fp16: bool) -> None:
        self._terms, self._fp16 = terms, fp16
        self._made: dict[tuple[tuple[str, int], ...], tuple[Tensors, ArrayRecord]] = {}

    def parcel(self, tasks: Iterable[Task]) -> RecordDict:
        records: Records = {}
        listed: list[Values] = []
        for number, task in enumerate(tasks):
            values = _values(task) | {"options": dict(task.options)}
            if task.tensors:
                records[f"tensors.{number}"] = self._shared(task.tensors)
            if task.kept:
                records[f"kept.{number}"] = _record(task.kept)
            listed.append(values | {part: _types(getattr(task, part)) for part in PARTS})
        records[NOTE] = ConfigRecord({**self._terms.note(), "tasks": json.dumps(listed)})
        return RecordDict(records)  # type: ignore[arg-type]

    def _shared(self, tensors: Tensors) -> ArrayRecord:
        key = tuple((name, id(tensor)) for name, tensor in tensors.items())
        if key not in self._made:
            self._made[key] = tensors, _record(tensors, self._fp16)  # they are held, so that no other takes their id
        return self._made[key][1]


def read_tasks(content: RecordDict) -> list[Task]:
    """Read the tasks in a message, on a client, which trusts its server."""
    tasks = []
    for number, values in enumerate(json.loads(str(content.config_records[NOTE]["tasks"]))):
        for part in PARTS:
            types: dict[str, str] = values[part]
            arrays = content.array_records[f"{part}.{number}"] if types else {}
            values[part] = {name: _tensor(arrays[name]).to(getattr(torch, types[name])) for name in types}
        tasks.append(Task(**values))
    return tasks


def reply_parcel(replies: Iterable[Reply], fp16: bool) -> RecordDict:
    records: Records = {}
    listed: list[Values] = []
    for number, reply in enumerate(replies):
        if isinstance(reply, Failure):
            listed.append({"failure": reply.reason})
            continue
        try:
            halves = fp16 and work_of(reply.kind).returns_network
            parts = {"tensors": _record(reply.tensors, halves), "kept": _record(reply.kept)}
        except FedhmError as error:  # other tasks in the same message may have gone well
            listed.append({"failure": str(error)})
            continue
        listed.append(_values(reply))
        records |= {f"{part}.{number}": record for part, record in parts.items() if record}
    records[NOTE] = ConfigRecord({"replies": json.dumps(listed)})
    return RecordDict(records)  # type: ignore[arg-type]


def read_replies(content: RecordDict, tasks: Sequence[Task], fp16: bool) -> list[Reply]:
    """Read the replies in a message, on the server, which trusts no client: each task gets one, whatever was sent.

    Here an update need only be readable. Whether it may be merged is for admission to say.
    """
    try:
        if not isinstance(content, RecordDict):  # Flower takes any of its objects for a message's content
            raise TypeError(f"its message holds a {type(content).__name__} in place of records")
        if set(content.config_records[NOTE]) != {"replies"}:
            raise ValueError("its note does not hold replies alone")
        listed = json.loads(str(content.config_records[NOTE]["replies"]))
        if not isinstance(listed, list) or len(listed) != len(tasks):
            raise ValueError(f"its message does not hold {len(tasks)} replies")
        if more := set(content) - {NOTE, *_places(len(tasks))}:
            raise ValueError(f"its message has a record {min(more)[:80]!r}")
    except Exception as error:
        return [Failure(task.client, unreadable(error)) for task in tasks]
    return [_read_reply(content, number, listed[number], task, fp16) for number, task in enumerate(tasks)]


def _read_reply(content: RecordDict, number: int, values: Any, task: Task, fp16: bool) -> Reply:
    try:
        if set(values) == {"failure"}:
            return Failure(task.client, printable(str(values["failure"])))
        if set(values) != UPDATE_VALUES:
            raise ValueError("its values are not those of an update")
        labels = values["labels"]
        values["labels"] = tuple(labels) if isinstance(labels, list) else labels
        for part in PARTS:
            arrays = content.array_records.get(f"{part}.{number}") or ArrayRecord()
            values[part] = {name: _tensor(arrays[name]) for name in arrays}
        if fp16 and work_of(task.kind).returns_network:
            values["tensors"] = {name: _as_sent(t, task.tensors.get(name)) for name, t in values["tensors"].items()}
        return Update(**values)
    except Exception as error:  # whatever a client may have put into its bytes
        return Failure(task.client, unreadable(error))


def travelled(content: RecordDict, count: int) -> list[int]:
    """Return the bytes of a message's records by task; what belongs to none, or to several, counts for the first."""
    places = _places(count)
    if not isinstance(content, RecordDict):
        return [0] * count
    seen: set[int] = set()
    counted = [0] * count
    for key, record in content.items():
        if id(record) not in seen:
            counted[places.get(key, 0)] += _size(record)
            seen.add(id(record))
    return counted


def _size(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    try:
        return record.count_bytes()
    except Exception:  # Flower cannot count a record that holds an empty text or list, as a client may send
        return 0


def _places(count: int) -> dict[str, int]:
    """Return the names of the records of so many tasks or replies, each with the number of its task."""
    return {f"{part}.{number}": number for part in PARTS for number in range(count)}


def _values(message: Task | Update) -> Values:
    return {field.name: getattr(message, field.name) for field in fields(message) if field.name not in ELSEWHERE}


def _types(tensors: Tensors) -> dict[str, str]:
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}


def _record(tensors: Tensors, fp16: bool = False) -> ArrayRecord:
    return ArrayRecord({name: _array(name, tensor, fp16) for name, tensor in tensors.items()})


def _array(name: str, tensor: Tensor, fp16: bool) -> Array:
    """Return a tensor as it travels. Matrices may be halved; vectors are few numbers, and some need their range."""
    if fp16 and tensor.ndim > 1 and tensor.is_floating_point():
        halved = tensor.half()
        if not halved.isfinite().all() and tensor.isfinite().all():
            largest = tensor.abs().max().item()
            raise FedhmError(f"'{name}' holds {largest:.3g}, too large for half precision: set engine.fp16 = false")
        tensor = halved
    try:
        return Array(tensor.contiguous().numpy())
    except TypeError:  # of bfloat16, which numpy has not
        raise FedhmError(f"'{name}' is of {tensor.dtype}, which cannot travel by Flower: use float32") from None


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.lib.format.read_array(BytesIO(array.data), allow_pickle=False))


def _as_sent(tensor: Tensor, sent: Tensor | None) -> Tensor:
    """Return a tensor that was halved to travel in its own type again."""
    halved = sent is not None and sent.ndim > 1 and tensor.dtype == torch.float16
    return tensor.to(sent.dtype) if sent is not None and halved else tensor


def unreadable(error: Exception) -> str:
    return f"it cannot be read ({printable(str(error), 200) or type(error).__name__})"

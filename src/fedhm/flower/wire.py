"""The message format: tasks and replies as Flower records, one array for each tensor, everything else as JSON.

Nothing is pickled. A message holds all tasks of one client in an exchange, because an exchange takes seconds
however little it carries. Its records are

    fedhm        a ConfigRecord of JSON texts: "terms" (`RunInfo`) and "tasks" on the way down, "replies" on the way up
    tensors.N    an ArrayRecord with the tensors of task or reply number N
    kept.N       an ArrayRecord with the tensors that the client keeps between tasks
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
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
from fedhm.work.messages import (
    UPDATE_VALUES,
    Failure,
    Reply,
    Task,
    task_from,
    task_values,
    update_from,
    update_values,
)
from fedhm.work.work import work_of

JSON_RECORD = "fedhm"  # the name of the record with everything that is not a tensor
TENSOR_FIELDS = ("tensors", "kept")

# Settings that clients do not need. Trackers have paths of the server, and devices are the files of other clients. The
# others would only make every message longer.
SERVER_ONLY: dict[str, Any] = {
    "tracking": True,
    "stop": True,
    "checkpoints": True,
    "server": {"optimizer", "lr", "momentum", "betas", "tau", "attackers", "trim"},
    "engine": {"superlink", "patience", "deadline", "devices"},
}
START_SETTINGS = {"min_clients", "missing"}  # of [federation], as are the next
DEVICE_SETTINGS = {"devices", "plan", "deadline"}  # the last two are refused without devices

Records = dict[str, ArrayRecord | ConfigRecord]
Values = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """The server's description of the run. Every message carries it, because a client process may live for one only."""

    config: ResolvedConfig
    classes: int  # 0: not known yet, the server is asking for the shape of the clients' inputs
    preprocessing: Preprocessing
    client_test: float = 0.0  # the share of its samples that a client holds out, unless it has test samples
    base_digest: str = ""  # identifies the frozen base of adapters, which does not travel; "" without adapters

    def encode(self) -> dict[str, str]:
        unneeded = START_SETTINGS | (DEVICE_SETTINGS if self.config.federation.devices else set())
        values = {
            "config": self.config.to_toml({**SERVER_ONLY, "federation": unneeded}),
            "classes": self.classes,
            "preprocessing": asdict(self.preprocessing),
        }
        if self.client_test:
            values["client_test"] = self.client_test
        if self.base_digest:
            values["base"] = self.base_digest
        return {"terms": _compact_json(values)}

    @classmethod
    def decode(cls, content: RecordDict) -> "RunInfo":
        return _decode_run_info(str(content.config_records[JSON_RECORD]["terms"]))


@lru_cache(maxsize=1)  # every message of a run carries the same text
def _decode_run_info(text: str) -> RunInfo:
    values = json.loads(text)
    preprocessing = values["preprocessing"]
    preprocessing |= {"mean": tuple(preprocessing["mean"]), "std": tuple(preprocessing["std"])}
    config = parse_resolved(values["config"], "the server's config")
    share, base = values.get("client_test", 0.0), values.get("base", "")
    return RunInfo(config, values["classes"], Preprocessing(**preprocessing), share, base)


def _compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # without spaces: every message carries it


def introduction_request(info: RunInfo) -> RecordDict:
    """Return the content of a message that asks a node which client it is."""
    return RecordDict({JSON_RECORD: ConfigRecord({**info.encode()})})


# Tasks: encoded by the server, decoded by a client, which trusts its server.


class TaskEncoder:
    """Encodes the tasks of one exchange. Clients with equal tensors share one record, which Flower uploads once."""

    def __init__(self, info: RunInfo, fp16: bool) -> None:
        self._info, self._fp16 = info, fp16
        self._encoded: dict[tuple[tuple[str, int], ...], tuple[Tensors, ArrayRecord]] = {}

    def encode(self, tasks: Iterable[Task]) -> RecordDict:
        records: Records = {}
        listed: list[Values] = []
        for number, task in enumerate(tasks):
            if task.tensors:
                records[f"tensors.{number}"] = self._shared_record(task.tensors)
            if task.kept:
                records[f"kept.{number}"] = _array_record(task.kept)
            listed.append(_task_values(task))
        records[JSON_RECORD] = ConfigRecord({**self._info.encode(), "tasks": _compact_json(listed)})
        return RecordDict(records)  # type: ignore[arg-type]

    def _shared_record(self, tensors: Tensors) -> ArrayRecord:
        key = tuple((name, id(tensor)) for name, tensor in tensors.items())
        if key not in self._encoded:
            # the tensors are held as well, so that no other tensor gets their ids
            self._encoded[key] = tensors, _array_record(tensors, self._fp16)
        return self._encoded[key][1]


def decode_tasks(content: RecordDict) -> list[Task]:
    listed = json.loads(str(content.config_records[JSON_RECORD]["tasks"]))
    return [_decode_task(content, number, values) for number, values in enumerate(listed)]


def _task_values(task: Task) -> Values:
    """Return the JSON of a task: its plain fields, and the types of its tensors before they were halved."""
    types = {part: _types(tensors) for part in TENSOR_FIELDS if (tensors := getattr(task, part))}
    return task_values(task) | types


def _decode_task(content: RecordDict, number: int, values: Values) -> Task:
    tensors, kept = (_typed_tensors(content, f"{part}.{number}", values.get(part, {})) for part in TENSOR_FIELDS)
    return task_from(values, tensors, kept)


def _typed_tensors(content: RecordDict, record: str, types: dict[str, str]) -> Tensors:
    arrays = content.array_records[record] if types else {}
    return {name: _tensor(arrays[name]).to(getattr(torch, types[name])) for name in types}


# Replies: encoded by a client, decoded by the server, which trusts no client.


def encode_replies(replies: Iterable[Reply], fp16: bool) -> RecordDict:
    records: Records = {}
    listed: list[Values] = []
    for number, reply in enumerate(replies):
        if isinstance(reply, Failure):
            listed.append({"failure": reply.reason})
            continue
        try:
            halve = fp16 and work_of(reply.kind).returns_network
            parts = {"tensors": _array_record(reply.tensors, halve), "kept": _array_record(reply.kept)}
        except FedhmError as error:  # other tasks in the same message may have gone well
            listed.append({"failure": str(error)})
            continue
        listed.append(update_values(reply))
        records |= {f"{part}.{number}": record for part, record in parts.items() if record}
    records[JSON_RECORD] = ConfigRecord({"replies": _compact_json(listed)})
    return RecordDict(records)  # type: ignore[arg-type]


def decode_replies(content: RecordDict, tasks: Sequence[Task], fp16: bool) -> list[Reply]:
    """Return one reply for each task, whatever the client sent.

    An update only has to be readable here. Admission decides whether it is merged.
    """
    try:
        if not isinstance(content, RecordDict):  # Flower accepts any of its objects as the content of a message
            raise TypeError(f"its message holds a {type(content).__name__} in place of records")
        if set(content.config_records[JSON_RECORD]) != {"replies"}:
            raise ValueError("its record 'fedhm' does not hold replies alone")
        listed = json.loads(str(content.config_records[JSON_RECORD]["replies"]))
        if not isinstance(listed, list) or len(listed) != len(tasks):
            raise ValueError(f"its message does not hold {len(tasks)} replies")
        if unknown := set(content) - {JSON_RECORD, *_task_of_record(len(tasks))}:
            raise ValueError(f"its message has a record {min(unknown)[:80]!r}")
    except Exception as error:
        return [Failure(task.client, unreadable_reason(error)) for task in tasks]
    return [_decode_reply(content, number, listed[number], task, fp16) for number, task in enumerate(tasks)]


def _decode_reply(content: RecordDict, number: int, values: Any, task: Task, fp16: bool) -> Reply:
    try:
        if set(values) == {"failure"}:
            return Failure(task.client, printable(str(values["failure"])))
        if set(values) != UPDATE_VALUES:
            raise ValueError("its values are not those of an update")
        records = [content.array_records.get(f"{part}.{number}") or ArrayRecord() for part in TENSOR_FIELDS]
        tensors, kept = ({name: _tensor(arrays[name]) for name in arrays} for arrays in records)
        if fp16 and work_of(task.kind).returns_network:
            tensors = {name: _unhalved(t, task.tensors.get(name)) for name, t in tensors.items()}
        return update_from(values, tensors, kept)
    except Exception as error:  # a client's bytes can raise anything
        return Failure(task.client, unreadable_reason(error))


def unreadable_reason(error: Exception) -> str:
    return f"it cannot be read ({printable(str(error), 200) or type(error).__name__})"


# Both ways.


def bytes_by_task(content: RecordDict, count: int) -> list[int]:
    """Return the bytes of a message's records for each task. Records of no task, or of several, count for the first."""
    counted = [0] * count
    if not isinstance(content, RecordDict):
        return counted
    task_of_record = _task_of_record(count)
    seen: set[int] = set()
    for key, record in content.items():
        if id(record) not in seen:
            counted[task_of_record.get(key, 0)] += _count_bytes(record)
            seen.add(id(record))
    return counted


def _count_bytes(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    try:
        return record.count_bytes()
    except Exception:  # Flower cannot count a record with an empty text or list, which a client may send
        return 0


def _task_of_record(count: int) -> dict[str, int]:
    """Return the names of the array records in a message of `count` tasks or replies, with the number of each task."""
    return {f"{part}.{number}": number for part in TENSOR_FIELDS for number in range(count)}


def _types(tensors: Tensors) -> dict[str, str]:
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}


def _array_record(tensors: Tensors, fp16: bool = False) -> ArrayRecord:
    return ArrayRecord({name: _array(name, tensor, fp16) for name, tensor in tensors.items()})


def _array(name: str, tensor: Tensor, fp16: bool) -> Array:
    """Return a tensor as Flower sends it. Only matrices are halved: vectors are small, and some need their range."""
    if fp16 and tensor.ndim > 1 and tensor.is_floating_point():
        halved = tensor.half()
        if not halved.isfinite().all() and tensor.isfinite().all():
            largest = tensor.abs().max().item()
            raise FedhmError(f"'{name}' holds {largest:.3g}, too large for half precision: set engine.fp16 = false")
        tensor = halved
    try:
        return Array(tensor.contiguous().numpy())
    except TypeError:  # numpy has no bfloat16
        raise FedhmError(f"'{name}' is of {tensor.dtype}, which Flower cannot send: use float32") from None


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.lib.format.read_array(BytesIO(array.data), allow_pickle=False))


def _unhalved(tensor: Tensor, sent: Tensor | None) -> Tensor:
    """Return a tensor of a reply in the type of the tensor that was sent, if it was halved on the way back."""
    if sent is not None and sent.ndim > 1 and tensor.dtype == torch.float16:
        return tensor.to(sent.dtype)
    return tensor

"""Tasks and replies between processes: their tensors in an arena, and the rest as JSON behind them."""

import json
import os
import struct
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhm.engines.arena import Arena, Place
from fedhm.errors import FedhmError
from fedhm.work.messages import Failure, Reply, Task, Update

Values = dict[str, Any]
Put = Callable[[Tensor], Place]


class Note(NamedTuple):
    """Where a parcel lies: small enough for a pipe to carry it whole, and never to block on it."""

    slot: int
    start: int
    length: int

    def send(self, pipe: int) -> None:
        os.write(pipe, _NOTE.pack(*self))

    @classmethod
    def receive(cls, pipe: int) -> "Note | None":
        """Return the next note; None if there is nobody left who could send one."""
        read = os.read(pipe, _NOTE.size)
        return cls(*_NOTE.unpack(read)) if read else None


_NOTE = struct.Struct("<QQQ")


def write(values: Values, slot: int, arena: Arena) -> Note:
    text = bytearray(json.dumps(values).encode())
    start, _, _ = arena.put(torch.frombuffer(text, dtype=torch.uint8))
    return Note(slot, start, len(text))


def read(note: Note, arena: Arena) -> Values:
    """Return what a parcel holds; whoever has read it may put its answer behind it."""
    arena.used = note.start + note.length
    values: Values = json.loads(arena.get((note.start, "uint8", [note.length])).numpy().tobytes())
    return values


def packed_task(task: Task, position: int, shared: Put, own: Put) -> Values:
    return {**_packed(task, shared, own), "options": dict(task.options), "position": position}


def unpacked_task(values: Values, shared: Arena, own: Arena) -> tuple[Task, int]:
    position: int = values.pop("position")
    tensors = {name: shared.get(place) for name, place in values["tensors"].items()}
    kept = {name: own.get(place) for name, place in values["kept"].items()}
    return Task(**{**values, "tensors": tensors, "kept": kept}), position


def packed_reply(reply: Reply, put: Put) -> Values:
    if isinstance(reply, Update):
        return {"update": _packed(reply, put, put)}
    failure = {"client": reply.client, "reason": reply.reason, "position": reply.position}
    return {"failure": failure, "trace": _trace(reply.cause) if reply.cause else ""}


def packed_error(error: BaseException, position: int) -> Values:
    said = str(error) if isinstance(error, FedhmError) else ""
    what = "".join(traceback.format_exception_only(error)).strip()
    return {"error": {"sentence": said, "what": what, "trace": _trace(error), "position": position}}


def unpacked_reply(values: Values, arena: Arena) -> Reply:
    """Return the reply in a parcel, with copies of its tensors: the arena is soon used for something else."""
    if "update" in values:
        update = values["update"]
        for part in ("tensors", "kept"):
            update[part] = {name: arena.get(place).clone() for name, place in update[part].items()}
        return Update(**{**update, "labels": None if update["labels"] is None else tuple(update["labels"])})
    cause = RuntimeError(values["failure"]["reason"])  # an exception cannot travel, where it happened can be said
    cause.add_note(f"In a worker process:\n{values['trace']}")
    return Failure(**values["failure"], cause=cause)


def unpacked_error(values: Values, task: Task) -> Exception:
    """Return what to raise in place of an exception that was raised in a worker."""
    if values["sentence"]:
        return FedhmError(values["sentence"])
    error = RuntimeError(f"client {task.client} (tier {task.tier}) in round {task.round} raised {values['what']}")
    error.add_note(f"In a worker process:\n{values['trace']}")
    return error


def _packed(message: Task | Update, tensors: Put, kept: Put) -> Values:
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    values["tensors"] = {name: tensors(tensor) for name, tensor in message.tensors.items()}
    values["kept"] = {name: kept(tensor) for name, tensor in message.kept.items()}
    return values


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))

"""Memory that processes share: tensors in a file without a name, which each of them maps."""

import io
import json
import math
import mmap
import os
import selectors
import signal
import struct
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, NoReturn, TextIO

import torch
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.machine.device import set_threads
from fedhm.machine.printable import quoted_command
from fedhm.machine.process import keep_freed_memory
from fedhm.work.client import Client
from fedhm.work.messages import Failure, Reply, Task, Update, task_from, task_values, update_from, update_values
from fedhm.work.work import work_of

ALIGNMENT = 64  # bytes, a cache line: enough for every type
SMALLEST = 1 << 16  # bytes that a file starts with

TensorLocation = tuple[int, str, list[int]]  # first byte, type, shape: plain values that can be sent


class SharedMemory:
    """Memory for tensors. Made before a fork, it is shared by both sides; only one may put tensors in at a time."""

    def __init__(self) -> None:
        self._file = _nameless_file()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.used = 0  # bytes: what is put next comes behind them

    def put(self, tensor: Tensor) -> TensorLocation:
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = start + tensor.numel() * tensor.element_size()
        place = (start, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        self.get(place).copy_(tensor.detach())
        return place

    def get(self, place: TensorLocation) -> Tensor:
        """Return the memory at `place` itself: it changes when something else is put there."""
        start, name, shape = place
        dtype: torch.dtype = getattr(torch, name)
        end = start + math.prod(shape) * dtype.itemsize
        if end == start:
            return torch.empty(shape, dtype=dtype)
        if end > len(self._bytes):
            self._map(end)
        return self._bytes[start:end].view(dtype).view(shape)

    def close(self) -> None:
        """Close the file; the memory itself is released once no tensor lies in it any more."""
        self._file.close()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _map(self, wanted: int) -> None:
        """Map the whole file, enlarged if need be. Tensors in an older mapping lie in the same memory."""
        size = os.fstat(self._file.fileno()).st_size
        if size < wanted:
            size = max(wanted, 2 * size, SMALLEST)
            os.ftruncate(self._file.fileno(), size)
        self._bytes = torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.uint8)


def _nameless_file() -> IO[Any]:
    if hasattr(os, "memfd_create"):  # plain memory; /dev/shm often has a limit of 64 MB, beyond which writers crash
        return os.fdopen(os.memfd_create("fedhm"), "r+b", buffering=0)
    return tempfile.TemporaryFile()


# Tasks and replies between processes: their tensors in an arena, and the rest as JSON behind them.

Values = dict[str, Any]
Put = Callable[[Tensor], TensorLocation]


class MessageRef(NamedTuple):
    """Where a parcel lies: small enough for a pipe to carry it whole, and never to block on it."""

    slot: int
    start: int
    length: int

    def send(self, pipe: int) -> None:
        os.write(pipe, _NOTE.pack(*self))

    @classmethod
    def receive(cls, pipe: int) -> "MessageRef | None":
        """Return the next note; None if there is nobody left who could send one."""
        read = os.read(pipe, _NOTE.size)
        return cls(*_NOTE.unpack(read)) if read else None


_NOTE = struct.Struct("<QQQ")


def write(values: Values, slot: int, arena: SharedMemory) -> MessageRef:
    text = bytearray(json.dumps(values).encode())
    start, _, _ = arena.put(torch.frombuffer(text, dtype=torch.uint8))
    return MessageRef(slot, start, len(text))


def read(note: MessageRef, arena: SharedMemory) -> Values:
    """Return what a parcel holds; whoever has read it may put its answer behind it."""
    arena.used = note.start + note.length
    values: Values = json.loads(arena.get((note.start, "uint8", [note.length])).numpy().tobytes())
    return values


def encode_task(task: Task, position: int, shared: Put, own: Put) -> Values:
    return {**task_values(task), **_placed(task, shared, own), "position": position}


def decode_task(values: Values, shared: SharedMemory, own: SharedMemory) -> tuple[Task, int]:
    position: int = values.pop("position")
    tensors = {name: shared.get(place) for name, place in values["tensors"].items()}
    kept = {name: own.get(place) for name, place in values["kept"].items()}
    return task_from(values, tensors, kept), position


def encode_reply(reply: Reply, put: Put) -> Values:
    if isinstance(reply, Update):
        carried = {name: getattr(reply, name) for name in ("position", "down", "up")}
        return {"update": {**update_values(reply), **carried, **_placed(reply, put, put)}}
    failure = {"client": reply.client, "reason": reply.reason, "position": reply.position}
    return {"failure": failure, "trace": _trace(reply.cause) if reply.cause else ""}


def encode_error(error: BaseException, position: int) -> Values:
    said = str(error) if isinstance(error, FedhmError) else ""
    what = "".join(traceback.format_exception_only(error)).strip()
    return {"error": {"sentence": said, "what": what, "trace": _trace(error), "position": position}}


def decode_reply(values: Values, arena: SharedMemory) -> Reply:
    """Return the reply in a parcel, with copies of its tensors: the arena is soon used for something else."""
    if "update" in values:
        update = values["update"]
        tensors, kept = (
            {name: arena.get(place).clone() for name, place in update[part].items()} for part in ("tensors", "kept")
        )
        return update_from(update, tensors, kept)
    cause = RuntimeError(values["failure"]["reason"])  # an exception cannot travel, where it happened can be said
    cause.add_note(f"In a worker process:\n{values['trace']}")
    return Failure(**values["failure"], cause=cause)


def decode_error(values: Values, task: Task) -> Exception:
    """Return what to raise in place of an exception that was raised in a worker."""
    if values["sentence"]:
        return FedhmError(values["sentence"])
    error = RuntimeError(f"client {task.client} (tier {task.tier}) in round {task.round} raised {values['what']}")
    error.add_note(f"In a worker process:\n{values['trace']}")
    return error


def _placed(message: Task | Update, tensors: Put, kept: Put) -> Values:
    """Put a message's tensors into shared memory, and return where they are."""
    return {
        "tensors": {name: tensors(tensor) for name, tensor in message.tensors.items()},
        "kept": {name: kept(tensor) for name, tensor in message.kept.items()},
    }


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# One run's tasks on their way to workers and back.


class TaskQueue:
    """A run's tasks, handed out as there are slots for them, and never far ahead of the oldest that is not answered:
    later replies have to wait for it, and must not become more and more."""

    def __init__(
        self, tasks: Iterable[Task], shared: SharedMemory, slots: Sequence[SharedMemory], notes: int, window: int
    ) -> None:
        self.under_way: dict[int, Task] = {}  # by position, oldest first
        self._tasks, self._position = iter(tasks), 0
        self._shared, self._slots, self._notes, self._window = shared, slots, notes, window
        self._free = list(range(len(slots)))
        self._places: dict[
            int, tuple[Tensor, TensorLocation]
        ] = {}  # by identity: what goes to many clients is written once
        shared.used = 0

    def hand_out(self) -> None:
        while self._free and self._position - next(iter(self.under_way), self._position) < self._window:
            task = next(self._tasks, None)
            if task is None:
                return
            slot = self._free.pop()
            own = self._slots[slot]
            own.used = 0
            self.under_way[self._position] = task
            write(encode_task(task, self._position, self._share, own.put), slot, own).send(self._notes)
            self._position += 1

    def accept(self, note: MessageRef) -> Reply:
        values = read(note, self._slots[note.slot])
        if "error" in values:
            raise decode_error(values["error"], self.under_way[values["error"]["position"]])
        reply = decode_reply(values, self._slots[note.slot])
        del self.under_way[reply.position]
        self._free.append(note.slot)
        return reply

    def _share(self, tensor: Tensor) -> TensorLocation:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = tensor, self._shared.put(tensor)  # held, so that its identity stays its own
        return self._places[id(tensor)][1]


# A worker process: takes tasks from the queue and answers them, until the process that started it is gone.

POLL = 0.5  # seconds between two looks at whether there still is a parent


@dataclass(frozen=True)
class WorkerContext:
    """What a worker shares with its parent and with the other workers."""

    shared: SharedMemory  # what the server sends, often to many clients
    slots: Sequence[SharedMemory]  # one for each task under way: the task, what only its client has, and the answer
    queue: int  # a pipe of notes on tasks: whichever worker is free takes the next one
    answers: int  # a pipe of this worker's notes on its answers
    busy_with: mmap.mmap  # for each worker, the position of its task plus 1: it may not live to tell
    number: int  # of this worker


def serve(clients: Sequence[Client], threads: int, desk: WorkerContext, parent: int) -> NoReturn:
    """Do all that a worker process does. It leaves alone what it inherited but is its parent's: handlers, buffers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    # OpenMP keeps a team of threads for each thread that computes. This one inherited a team whose members stayed
    # behind, and would wait for them for ever; a new thread gets a team of its own.
    work = threading.Thread(target=_work, args=(clients, threads, desk), daemon=True)
    work.start()
    while work.is_alive() and os.getppid() == parent:
        work.join(POLL)
    os._exit(0)


def _stream(descriptor: int) -> TextIO:
    """Open a stream for what a user's network prints: the inherited one may hold others' text, or a lock for ever."""
    try:
        return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)
    except OSError:  # the process has none
        return io.StringIO()


def _work(clients: Sequence[Client], threads: int, desk: WorkerContext) -> None:
    keep_freed_memory()
    set_threads(threads)
    with suppress(BrokenPipeError):  # nobody waits for an answer any more
        while note := MessageRef.receive(desk.queue):
            slot = desk.slots[note.slot]
            task, position = decode_task(read(note, slot), desk.shared, slot)
            struct.pack_into("<Q", desk.busy_with, 8 * desk.number, position + 1)
            try:
                values = encode_reply(clients[task.client].reply(task, position), slot.put)
            except BaseException as error:  # it ends the run, not this process
                values = encode_error(error, position)
            write(values, note.slot, slot).send(desk.answers)


# Worker processes that share a round's tasks: forked, so that they have all data and models without copies.

LOOK = 10.0  # seconds of silence until one looks whether a worker was stopped
AHEAD = 2  # tasks under way for each worker: the next one is there when it has finished one
WINDOW = 4  # for each worker, how many tasks may be handed out from the oldest on that is not answered
HELD_BACK = (signal.SIGINT, signal.SIGTERM)


class _Worker(NamedTuple):
    number: int
    pid: int
    replies: int  # where its notes come out


class WorkerPool:
    def __init__(self, clients: Sequence[Client], workers: int, threads: int) -> None:
        self.idle = True  # False from the beginning of a run until all its tasks are answered
        self._owner = os.getpid()
        self.size, self._workers, self._arenas, self._pipes = (
            workers,
            list[_Worker](),
            list[SharedMemory](),
            list[int](),
        )
        self._told_of: set[int] = set()  # workers that are stopped, by number
        self._busy_with = mmap.mmap(-1, 8 * workers)  # for each worker, the position of its task plus 1
        try:
            self._queue, self._notes = self._pipe()
            for _ in range(1 + AHEAD * workers):
                self._arenas.append(SharedMemory())
            for number in range(workers):
                self._start(number, clients, threads)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            reason = f"cannot start {workers} workers: {error.strerror}"
            raise FedhmError(f"{reason}; set engine.workers lower") from None

    def _start(self, number: int, clients: Sequence[Client], threads: int) -> None:
        replies, answers = self._pipe()
        desk = WorkerContext(self._arenas[0], self._arenas[1:], self._queue, answers, self._busy_with, number)
        # Ctrl-C waits until the worker ignores it and its parent knows of it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: `serve` says why it may
                pid = os.fork()
            if pid == 0:
                try:
                    for pipe in set(self._pipes) - {self._queue, answers}:
                        os.close(pipe)  # the parent's ends, so that they end with it
                    serve(clients, threads, desk, self._owner)
                finally:
                    os._exit(1)
            self._workers.append(_Worker(number, pid, replies))
        finally:
            self._pipes.remove(answers)
            os.close(answers)  # the worker's end likewise
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _pipe(self) -> tuple[int, int]:
        out, into = os.pipe()
        self._pipes += [out, into]
        return out, into

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        """Yield replies as they come. If the run is not finished, for whatever reason, no workers are left after it."""
        self.idle = False
        self._busy_with[:] = bytes(8 * self.size)
        dispatch = TaskQueue(tasks, self._arenas[0], self._arenas[1:], self._notes, WINDOW * self.size)
        try:
            dispatch.hand_out()
            while dispatch.under_way:
                if not self._workers:
                    raise FedhmError("the engine was closed, or used for something else, while a run was not finished")
                for worker in self._ready(dispatch.under_way):
                    note = MessageRef.receive(worker.replies)
                    if note is None:
                        raise self._death(worker, dispatch.under_way)
                    reply = dispatch.accept(note)
                    dispatch.hand_out()  # before the reply is merged: nobody waits for that
                    yield reply
            self.idle = True
        finally:
            if not self.idle:
                self.close()

    def _ready(self, under_way: dict[int, Task]) -> list[_Worker]:
        """Wait until some workers have answered or died, and return those."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            while not (ready := selector.select(LOOK)):
                self._tell_of_stopped(under_way)
            return [key.data for key, _ in ready]

    def _tell_of_stopped(self, under_way: dict[int, Task]) -> None:
        """Say which workers do not go on, each once. One that is slow is not among them, nor does the run fail."""
        if not hasattr(os, "waitid"):  # on macOS, where workers are rare
            return
        for worker in self._workers:
            stopped = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            if stopped and worker.number not in self._told_of:
                doing, go_on = self._doing(worker, under_way), quoted_command("kill", "-CONT", worker.pid)
                print(f"fedhm: worker process {worker.pid} was stopped{doing}: {go_on} lets it go on", file=sys.stderr)
            (self._told_of.add if stopped else self._told_of.discard)(worker.number)

    def _death(self, worker: _Worker, under_way: dict[int, Task]) -> FedhmError:
        how = "ended"
        with suppress(ChildProcessError):  # somebody else has waited for the process
            code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._workers.remove(worker)
        return FedhmError(
            f"a worker process {how}{self._doing(worker, under_way)}: there may not be enough memory for {self.size} "
            "workers, then set engine.workers lower; a run with a folder can be resumed from its last finished round"
        )

    def _doing(self, worker: _Worker, under_way: dict[int, Task]) -> str:
        """Return at which task a worker is, in a clause; nothing if it is at none."""
        (after,) = struct.unpack_from("<Q", self._busy_with, 8 * worker.number)
        task = under_way.get(after - 1)
        if task is None:
            return ""
        return f" while client {task.client} (tier {task.tier}) {work_of(task.kind).past} in round {task.round}"

    def close(self) -> None:
        """End the workers, whatever they are doing: they hold nothing that could be lost."""
        if os.getpid() != self._owner:
            return  # in a process that a user forked, and whose workers they are not
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            with suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
        for pipe in self._pipes:
            os.close(pipe)
        for arena in self._arenas:
            arena.close()
        self._workers, self._pipes, self._arenas = [], [], []

    def __del__(self) -> None:
        self.close()

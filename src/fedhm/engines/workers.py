"""Worker processes that share a round's tasks: shared memory, messages, the task queue, a worker, and the pool.

Workers are forked, so they have all data and models without copies. Tensors travel in shared memory, the rest of a
message as JSON behind them. Small references to messages travel through pipes.
"""

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

from fedhm.engines.masks import masks_without_waiting
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU, set_threads
from fedhm.machine.memory import NotEnoughMemoryError, lacks_memory
from fedhm.machine.printable import quoted_command
from fedhm.machine.process import keep_freed_memory
from fedhm.work.client import Client
from fedhm.work.messages import Failure, Reply, Task, Update, task_from, task_values, update_from, update_values
from fedhm.work.work import work_of

# Shared memory

ALIGNMENT = 64  # bytes, a cache line: enough for every type
SMALLEST = 1 << 16  # bytes that a file starts with

TensorLocation = tuple[int, str, list[int]]  # first byte, type, shape: plain values that can be sent


class SharedMemory:
    """Memory for tensors: a file without a name, which each process maps.

    If it is made before a fork, both sides share it. Only one process may put tensors in at a time.
    """

    def __init__(self) -> None:
        self._file = _nameless_file()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.used = 0  # bytes: the next tensor is put behind them

    def put(self, tensor: Tensor) -> TensorLocation:
        """Copy a tensor into the memory, and return its location."""
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = start + tensor.numel() * tensor.element_size()
        location = (start, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        self.get(location).copy_(tensor.detach())
        return location

    def get(self, location: TensorLocation) -> Tensor:
        """Return the memory at a location as a tensor. It changes if something else is put there."""
        start, name, shape = location
        dtype: torch.dtype = getattr(torch, name)
        end = start + math.prod(shape) * dtype.itemsize
        if end == start:
            return torch.empty(shape, dtype=dtype)
        if end > len(self._bytes):
            self._map(end)
        return self._bytes[start:end].view(dtype).view(shape)

    def close(self) -> None:
        """Close the file. The memory is released when no tensor uses it any more."""
        self._file.close()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _map(self, wanted: int) -> None:
        """Map the whole file, enlarged if needed. Tensors in an older mapping use the same memory."""
        size = os.fstat(self._file.fileno()).st_size
        if size < wanted:
            size = max(wanted, 2 * size, SMALLEST)
            os.ftruncate(self._file.fileno(), size)
        self._bytes = torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.uint8)


def _nameless_file() -> IO[Any]:
    if hasattr(os, "memfd_create"):  # plain memory; /dev/shm often has a limit of 64 MB, beyond which writers crash
        return os.fdopen(os.memfd_create("fedhm"), "r+b", buffering=0)
    return tempfile.TemporaryFile()


# Messages: tasks and replies, their tensors in shared memory and the rest as JSON behind them

Values = dict[str, Any]
Put = Callable[[Tensor], TensorLocation]


class MessageRef(NamedTuple):
    """Where a message is stored. A reference is small enough for a pipe to carry whole, without ever blocking."""

    slot: int
    start: int
    length: int

    def send(self, pipe: int) -> None:
        os.write(pipe, _REFERENCE.pack(*self))

    @classmethod
    def receive(cls, pipe: int) -> "MessageRef | None":
        """Return the next reference; None if no process is left that could send one."""
        read = os.read(pipe, _REFERENCE.size)
        return cls(*_REFERENCE.unpack(read)) if read else None


_REFERENCE = struct.Struct("<QQQ")


def write_message(values: Values, slot: int, memory: SharedMemory) -> MessageRef:
    """Write a message behind its tensors."""
    text = bytearray(json.dumps(values).encode())
    start, _, _ = memory.put(torch.frombuffer(text, dtype=torch.uint8))
    return MessageRef(slot, start, len(text))


def read_message(reference: MessageRef, memory: SharedMemory) -> Values:
    """Return a message. The reader may put its answer behind it."""
    memory.used = reference.start + reference.length
    values: Values = json.loads(memory.get((reference.start, "uint8", [reference.length])).numpy().tobytes())
    return values


def encode_task(task: Task, position: int, shared: Put, own: Put) -> Values:
    return {**task_values(task), **_put_tensors(task, shared, own), "position": position}


def decode_task(values: Values, shared: SharedMemory, own: SharedMemory) -> tuple[Task, int]:
    position: int = values.pop("position")
    tensors = {name: shared.get(location) for name, location in values["tensors"].items()}
    kept = {name: own.get(location) for name, location in values["kept"].items()}
    return task_from(values, tensors, kept), position


FORKED_TOO_LATE = "in combination with fork-based multiprocessing"  # torch's words
CANNOT_FORK = (
    "this process has trained a network itself, after which torch cannot train on an accelerator in forked processes: "
    "set engine.workers = 1, or use a new process"
)


def encode_reply(reply: Reply, put: Put) -> Values:
    if isinstance(reply, Update):
        carried = {name: getattr(reply, name) for name in ("position", "down", "up")}
        return {"update": {**update_values(reply), **carried, **_put_tensors(reply, put, put)}}
    if FORKED_TOO_LATE in reply.reason:
        raise FedhmError(CANNOT_FORK)
    failure = {"client": reply.client, "reason": reply.reason, "position": reply.position}
    return {"failure": failure, "trace": _trace(reply.cause) if reply.cause else ""}


def decode_reply(values: Values, memory: SharedMemory) -> Reply:
    """Return the reply in a message, with copies of its tensors: the memory is soon used for another task."""
    if "update" in values:
        update = values["update"]
        tensors, kept = (
            {name: memory.get(location).clone() for name, location in update[part].items()}
            for part in ("tensors", "kept")
        )
        return update_from(update, tensors, kept)
    cause = RuntimeError(values["failure"]["reason"])  # an exception cannot travel, but its traceback can
    cause.add_note(f"In a worker process:\n{values['trace']}")
    return Failure(**values["failure"], cause=cause)


def encode_error(error: BaseException, position: int) -> Values:
    if lacks_memory(error) and not isinstance(error, NotEnoughMemoryError):
        error = NotEnoughMemoryError("there is not enough memory for the worker processes: set engine.workers lower")
    sentence = str(error) if isinstance(error, FedhmError) else ""
    what = "".join(traceback.format_exception_only(error)).strip()
    memory = isinstance(error, NotEnoughMemoryError)
    found = {"sentence": sentence, "memory": memory, "what": what, "trace": _trace(error), "position": position}
    return {"error": found}


def decode_error(values: Values, task: Task) -> Exception:
    """Return the exception to raise here for one that was raised in a worker."""
    if values["sentence"]:
        return (NotEnoughMemoryError if values["memory"] else FedhmError)(values["sentence"])
    error = RuntimeError(f"client {task.client} (tier {task.tier}) in round {task.round} raised {values['what']}")
    error.add_note(f"In a worker process:\n{values['trace']}")
    return error


def _put_tensors(message: Task | Update, tensors: Put, kept: Put) -> Values:
    """Put a message's tensors into shared memory, and return their locations."""
    return {
        "tensors": {name: tensors(tensor) for name, tensor in message.tensors.items()},
        "kept": {name: kept(tensor) for name, tensor in message.kept.items()},
    }


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# The queue of a run's tasks


class TaskQueue:
    """Sends a run's tasks to the workers as slots become free, and takes their replies.

    Tasks are never sent far ahead of the oldest task without a reply. Later replies have to wait for it, and their
    number must stay bounded.

    queue   the pipe of references to tasks
    window  how many tasks may be sent from the oldest task without a reply on
    """

    def __init__(
        self, tasks: Iterable[Task], shared: SharedMemory, slots: Sequence[SharedMemory], queue: int, window: int
    ) -> None:
        self.under_way: dict[int, Task] = {}  # by position, oldest first
        self._tasks, self._position = iter(tasks), 0
        self._shared, self._slots, self._queue, self._window = shared, slots, queue, window
        self._free = list(range(len(slots)))
        # by identity: a tensor that goes to many clients is written once
        self._locations: dict[int, tuple[Tensor, TensorLocation]] = {}
        shared.used = 0

    def send_tasks(self) -> None:
        """Send tasks while there are free slots."""
        while self._free and self._position - next(iter(self.under_way), self._position) < self._window:
            task = next(self._tasks, None)
            if task is None:
                return
            slot = self._free.pop()
            own = self._slots[slot]
            own.used = 0
            self.under_way[self._position] = task
            write_message(encode_task(task, self._position, self._share, own.put), slot, own).send(self._queue)
            self._position += 1

    def take_reply(self, reference: MessageRef) -> Reply:
        """Return the reply of a worker and free its slot; raises the worker's exception if there was one."""
        values = read_message(reference, self._slots[reference.slot])
        if "error" in values:
            raise decode_error(values["error"], self.under_way[values["error"]["position"]])
        reply = decode_reply(values, self._slots[reference.slot])
        del self.under_way[reply.position]
        self._free.append(reference.slot)
        return reply

    def _share(self, tensor: Tensor) -> TensorLocation:
        if id(tensor) not in self._locations:
            # the tensor is held, so that no other tensor gets its identity
            self._locations[id(tensor)] = tensor, self._shared.put(tensor)
        return self._locations[id(tensor)][1]


# A worker process

PARENT_CHECK_SECONDS = 0.5  # between two checks that the parent process still exists


@dataclass(frozen=True)
class WorkerContext:
    """Everything that a worker shares with its parent and with the other workers."""

    shared: SharedMemory  # tensors from the server, which often go to many clients
    slots: Sequence[SharedMemory]  # one for each task under way: the task, its client's own tensors, and the answer
    queue: int  # a pipe of references to tasks: whichever worker is free takes the next one
    answers: int  # a pipe of references to this worker's answers
    busy_with: mmap.mmap  # for each worker, the position of its task plus 1, in case the worker dies
    number: int  # of this worker
    device: torch.device  # on which it runs networks


def serve(clients: Sequence[Client], threads: int, context: WorkerContext, parent: int) -> NoReturn:
    """Run a worker process: take tasks from the queue and answer them, until the parent process is gone.

    The worker does not use the signal handlers and buffers that it inherited from its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    sys.stdout, sys.stderr = _stream(1, sys.stdout), _stream(2, sys.stderr)
    # OpenMP keeps a team of threads for each thread that computes. This thread inherited a team whose members were not
    # forked, and would wait for them for ever. A new thread gets a team of its own.
    work = threading.Thread(target=_work, args=(clients, threads, context), daemon=True)
    work.start()
    while work.is_alive() and os.getppid() == parent:
        work.join(PARENT_CHECK_SECONDS)
    os._exit(0)


def _stream(descriptor: int, inherited: TextIO | None) -> TextIO:
    """Open a stream for the output of a user's network. The inherited stream may hold foreign text, or a lock."""
    encoding = getattr(inherited, "encoding", None) or "utf-8"
    try:
        return open(descriptor, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)
    except OSError:  # the process has no such stream
        return io.StringIO()


def _work(clients: Sequence[Client], threads: int, context: WorkerContext) -> None:
    keep_freed_memory()
    set_threads(threads)
    for client in clients if context.device != CPU else ():
        client.use_device(context.device)
    try:
        while reference := MessageRef.receive(context.queue):
            slot = context.slots[reference.slot]
            task, position = decode_task(read_message(reference, slot), context.shared, slot)
            struct.pack_into("<Q", context.busy_with, 8 * context.number, position + 1)
            try:
                with masks_without_waiting(context.device):
                    reply = clients[task.client].reply(task, position)
                values = encode_reply(reply, slot.put)
            except BaseException as error:  # it ends the run, not this process
                values = encode_error(error, position)
            write_message(values, reference.slot, slot).send(context.answers)
    except BrokenPipeError:
        return  # the parent does not wait for answers any more
    except Exception as error:
        if not lacks_memory(error):  # without memory for an answer, the end of this process tells the parent
            raise


# The pool of workers

STOPPED_CHECK_SECONDS = 10.0  # without any reply, until the pool checks whether a worker was stopped
TASKS_PER_WORKER = 2  # under way: the next task is there when a worker has finished one
WINDOW = 4  # for each worker: how many tasks may be sent from the oldest task without a reply on
DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Worker(NamedTuple):
    number: int
    pid: int
    replies: int  # the pipe from which its references are read


class WorkerPool:
    """Forked worker processes, and the memory and pipes that they share with this process.

    We wrote this because `concurrent.futures` hangs in OpenMP after a fork, leaves orphans, and cannot name a dead
    worker's task.
    """

    def __init__(
        self, clients: Sequence[Client], workers: int, threads: int, devices: Sequence[torch.device] = (CPU,)
    ) -> None:
        self.idle = True  # False from the beginning of a run until all its tasks are answered
        self.size = workers
        self._owner = os.getpid()
        self._workers: list[_Worker] = []
        self._memory: list[SharedMemory] = []  # the first one for all tasks, the others one for each slot
        self._pipes: list[int] = []
        self._reported_stopped: set[int] = set()  # workers by number
        self._busy_with = mmap.mmap(-1, 8 * workers)  # for each worker, the position of its task plus 1
        try:
            self._queue_out, self._queue_in = self._pipe()
            for _ in range(1 + TASKS_PER_WORKER * workers):
                self._memory.append(SharedMemory())
            for number in range(workers):
                self._start(number, clients, threads, devices[number % len(devices)])
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            reason = f"cannot start {workers} workers: {error.strerror}"
            raise FedhmError(f"{reason}; set engine.workers lower") from None

    def _start(self, number: int, clients: Sequence[Client], threads: int, device: torch.device) -> None:
        replies, answers = self._pipe()
        shared, *slots = self._memory
        context = WorkerContext(shared, slots, self._queue_out, answers, self._busy_with, number, device)
        # Ctrl-C is deferred until the worker ignores it and the parent has its process id.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Forking beside threads is deprecated; `serve` explains why it is safe here.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                try:
                    for pipe in set(self._pipes) - {self._queue_out, answers}:
                        os.close(pipe)  # the parent's ends, so that they end with the parent
                    serve(clients, threads, context, self._owner)
                finally:
                    os._exit(1)
            self._workers.append(_Worker(number, pid, replies))
        finally:
            self._pipes.remove(answers)
            os.close(answers)  # the worker's end, so that it ends with the worker
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _pipe(self) -> tuple[int, int]:
        out, into = os.pipe()
        self._pipes += [out, into]
        return out, into

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        """Yield replies as they come. If the run does not finish, for any reason, its workers are ended."""
        self.idle = False
        self._busy_with[:] = bytes(8 * self.size)
        queue = TaskQueue(tasks, self._memory[0], self._memory[1:], self._queue_in, WINDOW * self.size)
        try:
            queue.send_tasks()
            while queue.under_way:
                if not self._workers:
                    raise FedhmError("the engine was closed, or used for something else, while a run was not finished")
                for worker in self._ready(queue.under_way):
                    reference = MessageRef.receive(worker.replies)
                    if reference is None:
                        raise self._death(worker, queue.under_way)
                    reply = queue.take_reply(reference)
                    queue.send_tasks()  # before the reply is merged, so that no worker waits for that
                    yield reply
            self.idle = True
        finally:
            if not self.idle:
                self.close()

    def _ready(self, under_way: dict[int, Task]) -> list[_Worker]:
        """Wait until some workers have answered or died, and return these workers."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            while not (ready := selector.select(STOPPED_CHECK_SECONDS)):
                self._report_stopped(under_way)
            return [key.data for key, _ in ready]

    def _report_stopped(self, under_way: dict[int, Task]) -> None:
        """Print which workers were stopped by a signal, each once. Slow workers are not reported; the run goes on."""
        if not hasattr(os, "waitid"):  # on macOS, where workers are rare
            return
        for worker in self._workers:
            stopped = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            if stopped and worker.number not in self._reported_stopped:
                doing, resume = self._doing(worker, under_way), quoted_command("kill", "-CONT", worker.pid)
                print(f"fedhm: worker process {worker.pid} was stopped{doing}: {resume} lets it go on", file=sys.stderr)
            (self._reported_stopped.add if stopped else self._reported_stopped.discard)(worker.number)

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
        """Return a clause that names a worker's task; empty if it has none."""
        (after,) = struct.unpack_from("<Q", self._busy_with, 8 * worker.number)
        task = under_way.get(after - 1)
        if task is None:
            return ""
        return f" while client {task.client} (tier {task.tier}) {work_of(task.kind).past} in round {task.round}"

    def close(self) -> None:
        """End the workers, whatever they are doing: they hold nothing that could be lost."""
        if os.getpid() != self._owner:
            return  # a process that the user forked does not own the workers
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            with suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
        for pipe in self._pipes:
            os.close(pipe)
        for memory in self._memory:
            memory.close()
        self._workers, self._pipes, self._memory = [], [], []

    def __del__(self) -> None:
        self.close()

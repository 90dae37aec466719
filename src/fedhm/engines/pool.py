"""Worker processes that share a round's tasks: forked, so that they have all data and models without copies."""

import mmap
import os
import selectors
import signal
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from fedhm.engines.arena import Arena
from fedhm.engines.dispatch import Dispatch
from fedhm.engines.parcel import Note
from fedhm.engines.worker import Desk, serve
from fedhm.errors import FedhmError
from fedhm.machine.printable import pasteable
from fedhm.work.client import Client
from fedhm.work.messages import Reply, Task
from fedhm.work.work import work_of

LOOK = 10.0  # seconds of silence until one looks whether a worker was stopped
AHEAD = 2  # tasks under way for each worker: the next one is there when it has finished one
WINDOW = 4  # for each worker, how many tasks may be handed out from the oldest on that is not answered
HELD_BACK = (signal.SIGINT, signal.SIGTERM)


class _Worker(NamedTuple):
    number: int
    pid: int
    replies: int  # where its notes come out


class Pool:
    def __init__(self, clients: Sequence[Client], workers: int, threads: int) -> None:
        self.idle = True  # False from the beginning of a run until all its tasks are answered
        self._owner = os.getpid()
        self.size, self._workers, self._arenas, self._pipes = workers, list[_Worker](), list[Arena](), list[int]()
        self._told_of: set[int] = set()  # workers that are stopped, by number
        self._busy_with = mmap.mmap(-1, 8 * workers)  # for each worker, the position of its task plus 1
        try:
            self._queue, self._notes = self._pipe()
            for _ in range(1 + AHEAD * workers):
                self._arenas.append(Arena())
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
        desk = Desk(self._arenas[0], self._arenas[1:], self._queue, answers, self._busy_with, number)
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
        dispatch = Dispatch(tasks, self._arenas[0], self._arenas[1:], self._notes, WINDOW * self.size)
        try:
            dispatch.hand_out()
            while dispatch.under_way:
                if not self._workers:
                    raise FedhmError("the engine was closed, or used for something else, while a run was not finished")
                for worker in self._ready(dispatch.under_way):
                    note = Note.receive(worker.replies)
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
                doing, go_on = self._doing(worker, under_way), pasteable("kill", "-CONT", worker.pid)
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

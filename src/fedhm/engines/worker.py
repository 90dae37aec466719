"""A worker process: takes tasks from the queue and answers them, until the process that started it is gone."""

import ctypes
import io
import mmap
import os
import signal
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TextIO

import torch

from fedhm.engines.arena import Arena
from fedhm.engines.parcel import Note, packed_error, packed_reply, read, unpacked_task, write
from fedhm.work.client import Client

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
POLL = 0.5  # seconds between two looks at whether there still is a parent


@dataclass(frozen=True)
class Desk:
    """What a worker shares with its parent and with the other workers."""

    shared: Arena  # what the server sends, often to many clients
    slots: Sequence[Arena]  # one for each task under way: the task, what only its client has, and the answer
    queue: int  # a pipe of notes on tasks: whichever worker is free takes the next one
    answers: int  # a pipe of this worker's notes on its answers
    busy_with: mmap.mmap  # for each worker, the position of its task plus 1: it may not live to tell
    number: int  # of this worker


def serve(clients: Sequence[Client], threads: int, desk: Desk, parent: int) -> NoReturn:
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


def _keep_freed_memory() -> None:
    """Make glibc keep what a training step frees, since the next one wants it. By its defaults glibc gives much of it
    back to the system each time, and a step spends a tenth of its time or more on getting it page by page."""
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def _work(clients: Sequence[Client], threads: int, desk: Desk) -> None:
    _keep_freed_memory()
    torch.set_num_threads(threads)
    with suppress(BrokenPipeError):  # nobody waits for an answer any more
        while note := Note.receive(desk.queue):
            slot = desk.slots[note.slot]
            task, position = unpacked_task(read(note, slot), desk.shared, slot)
            struct.pack_into("<Q", desk.busy_with, 8 * desk.number, position + 1)
            try:
                values = packed_reply(clients[task.client].reply(task, position), slot.put)
            except BaseException as error:  # it ends the run, not this process
                values = packed_error(error, position)
            write(values, note.slot, slot).send(desk.answers)

"""Locks between processes: a file is locked by one process at a time, and free once that has ended in any way."""

from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout


def take_lock(path: Path, wait: float = 0.0) -> BaseFileLock | None:
    """Return the lock on `path`, or None if somebody else holds it for `wait` seconds; below 0 there is no limit.

    It is held until it is released, is no longer referred to, or the process ends. Forked processes, such as workers,
    never hold it, since filelock closes it in them: it must not outlive the process that took it.
    """
    lock = FileLock(path, timeout=wait, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def is_locked(path: Path) -> bool:
    """Say whether anybody holds the lock on `path`."""
    lock = take_lock(path)
    if lock is None:
        return True
    lock.release()
    return False

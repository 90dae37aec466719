"""Files and folders: atomic writes, names that every system accepts, checks before the work, and locks."""

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from filelock import BaseFileLock, FileLock, Timeout

from fedhm.errors import FedhmError


def check_utf8_name(path: Path) -> None:
    """Raise if a name is not UTF-8: it could neither be written into files nor shown."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise FedhmError(f"the name {shown} is not in UTF-8: rename it, or choose another") from None


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file such that it is either complete or not there.

    The content goes to a file beside `path` and to disk. Then one step replaces `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with create_beside(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
    with suppress(PermissionError):  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def create_beside(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create the temporary file `path`.tmp, and open it for writing.

    The file of an earlier, killed process is removed. A link in its place is not followed: it could lead anywhere.
    """
    beside = path.with_name(path.name + ".tmp")
    beside.unlink(missing_ok=True)
    return open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; raise OSError for anything but a regular file: reading a pipe would wait for ever."""
    # only Windows has O_BINARY, and it lacks O_NONBLOCK
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; raise OSError for anything else."""
    with open_regular(path) as file:
        return file.read()


_REFUSED = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')  # characters that some system refuses or takes for a path
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # of Windows, with any suffix


def file_name(name: str) -> str:
    """Return the file name of a tier or an entry that every system accepts: 1-8 for 1/8, memory-5MB for memory:5MB."""
    plain = _REFUSED.sub("-", name).rstrip(". ")
    return f"_{plain}" if not plain or plain.startswith(".") or _DEVICES.match(plain) else plain


def check_file_names(names: Iterable[str]) -> None:
    """Raise if two tiers would have the same file. Some systems ignore the difference between a and A."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(file_name(name).casefold(), name)
        if other != name:
            raise FedhmError(f"the tiers '{other}' and '{name}' would share a file: rename one of them")


def check_folder(path: Path) -> None:
    """Raise if a folder cannot be made or written into, before the work for its content begins."""
    try:
        there = next((part for part in (path, *path.absolute().parents) if part.exists()), path)
        if there.exists() and not there.is_dir():
            raise FedhmError(f"cannot make the folder {path}: {there} is a file; choose another place")
    except OSError as error:
        raise FedhmError(f"cannot make the folder {path}: {os_error_reason(error)}") from None
    if not os.access(there, os.W_OK | os.X_OK):
        raise FedhmError(f"cannot write into the folder {there}: {os.strerror(errno.EACCES).lower()}")


def check_file(path: Path) -> None:
    """Raise if a file cannot be written, before the work for its content begins."""
    check_folder(path.parent)
    if path.is_dir():
        raise FedhmError(f"cannot write the file {path}: it is a folder; name a file in it")


def make_folder(path: Path) -> None:
    """Make a folder if it does not exist, and check that files can be written into it."""
    check_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise FedhmError(f"cannot write into the folder {path}: {os_error_reason(error)}") from None


def os_error_reason(error: OSError) -> str:
    """Return the system's reason for an error, as the end of a sentence."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason[:1].lower() + reason[1:]


def os_error_sentence(error: OSError) -> str:
    """Return one sentence for an error of the system."""
    if error.strerror is None or not isinstance(error.filename, str):
        return f"cannot go on: {os_error_reason(error)}"
    return f"cannot read or write {error.filename.removesuffix('.tmp')}: {os_error_reason(error)}"


def take_lock(path: Path, wait: float = 0.0) -> BaseFileLock | None:
    """Return the lock on `path`, or None if another process holds it for `wait` seconds; below 0 there is no limit.

    The lock is held until it is released, is no longer referenced, or the process ends in any way. Forked processes,
    such as workers, never hold it, since filelock closes it in them: it must not outlive the process that took it.
    """
    lock = FileLock(path, timeout=wait, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def is_locked(path: Path) -> bool:
    """Tell whether any process holds the lock on `path`."""
    lock = take_lock(path)
    if lock is None:
        return True
    lock.release()
    return False

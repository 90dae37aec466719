"""Files that are either there whole or not at all, and tensors with a header in one of them."""

import errno
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from fedhm.errors import FedhmError


def check_utf8_name(path: Path) -> None:
    """Refuse a name that is no text: it could neither be written into files nor shown."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise FedhmError(f"the name {shown} is not in UTF-8: rename it, or choose another") from None


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file beside `path`, bring it to disk, then put it in the place of `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    with suppress(PermissionError):  # Windows opens no folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# Where files can be: names that every system takes, and folders that can be written into.

_REFUSED = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')  # by some system, or a part of a path there
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # of Windows, whatever comes after a dot


def file_name(name: str) -> str:
    """Return how files of a tier or an entry are called on every system: 1/8 is 1-8, memory:5MB is memory-5MB."""
    plain = _REFUSED.sub("-", name).rstrip(". ")
    return f"_{plain}" if not plain or plain.startswith(".") or _DEVICES.match(plain) else plain


def check_file_names(names: Iterable[str]) -> None:
    """Refuse tiers whose files would be the same one; some systems do not tell capitals from other letters."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(file_name(name).casefold(), name)
        if other != name:
            raise FedhmError(f"the tiers '{other}' and '{name}' would share a file: rename one of them")


def check_folder(path: Path) -> None:
    """Refuse a folder that cannot be made, or not be written into, before anything is done for what it is to hold."""
    try:
        there = next((part for part in (path, *path.absolute().parents) if part.exists()), path)
        if there.exists() and not there.is_dir():
            raise FedhmError(f"cannot make the folder {path}: {there} is a file; choose another place")
    except OSError as error:
        raise FedhmError(f"cannot make the folder {path}: {os_error_reason(error)}") from None
    if not os.access(there, os.W_OK | os.X_OK):
        raise FedhmError(f"cannot write into the folder {there}: {os.strerror(errno.EACCES).lower()}")


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is done for what it is to hold."""
    check_folder(path.parent)
    if path.is_dir():
        raise FedhmError(f"cannot write the file {path}: it is a folder; name a file in it")


def make_folder(path: Path) -> None:
    """Make a folder, unless it is there, and make sure that files can be written into it."""
    check_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise FedhmError(f"cannot write into the folder {path}: {os_error_reason(error)}") from None


def os_error_reason(error: OSError) -> str:
    """Return why the system refused something, as the end of a sentence."""
    said = error.strerror or str(error) or type(error).__name__
    return said[:1].lower() + said[1:]


def os_error_sentence(error: OSError) -> str:
    """Return a sentence for what the system refused."""
    if error.strerror is None or not isinstance(error.filename, str):
        return f"cannot go on: {os_error_reason(error)}"
    return f"cannot read or write {error.filename.removesuffix('.tmp')}: {os_error_reason(error)}"


# Locks between processes: a file is locked by one process at a time, and free once that has ended in any way.


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

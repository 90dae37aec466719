"""The folder of a federation on this machine: what lies where, whether it runs, and how to connect to it."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import lock_descriptor

from fedhm.errors import FedhmError
from fedhm.flower.processes.connection import Connection, named_connection
from fedhm.flower.processes.private import private_files
from fedhm.machine.files import write_atomically
from fedhm.machine.printable import pasteable

NAME = "federation"  # of the connection
CLEARING = 30.0  # seconds until the processes of a federation that was killed are gone


@dataclass(frozen=True)
class FleetFolder:
    path: Path  # absolute

    @property
    def connection(self) -> Connection:
        return Connection(self.path / "flower", NAME)

    @property
    def certificates(self) -> Path:
        return self.path / "certificates"

    @property
    def database(self) -> Path:
        return self.path / "state.db"

    def key(self, client: int) -> Path:
        return self.path / "keys" / f"client-{client}"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    @property
    def announcement(self) -> Path:
        """Return the path of a file that exists while the federation is up."""
        return self.path / "connection.json"

    @property
    def runs(self) -> bool:
        try:
            with (self.path / "lock").open() as file:
                return not lock_descriptor(file.fileno(), blocking=False) and _lives(file.read())
        except FileNotFoundError:
            return False

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock of the one federation that may run here, and yield its descriptor.

        The federation's processes inherit it, so that the lock is free once the last of them has ended. A FileLock
        would keep it to itself and close it with this process, while a SuperLink may still wait for its SuperNodes.
        """
        with _opened(self.path / "lock") as file:
            until = time.monotonic() + CLEARING
            while not lock_descriptor(file.fileno(), blocking=False):
                file.seek(0)
                if _lives(file.read()) or time.monotonic() > until:
                    raise FedhmError(f"a federation runs in {self.path} already; end it, or name another --folder")
                time.sleep(0.2)
            file.seek(0)
            file.truncate()
            file.write(json.dumps({"pid": os.getpid()}))
            file.flush()
            self.announcement.unlink(missing_ok=True)  # of one that was killed
            (self.path / ".gitignore").write_text("*\n")  # there are private keys in it
            try:
                yield file.fileno()
            finally:
                self.announcement.unlink(missing_ok=True)

    def announce(self, address: str, clients: int) -> None:
        about = {"address": address, "clients": clients, "home": "flower", "name": NAME}
        write_atomically(self.announcement, json.dumps(about, indent=2) + "\n")


def connection_of(superlink: str) -> Connection:
    """Return the connection of `superlink`: the folder of a `fedhm flower up`, or the name of a user's connection."""
    folder = FleetFolder(Path(superlink).absolute())
    if not (folder.path / "lock").exists():
        return named_connection(superlink)
    if not folder.runs:
        raise FedhmError(
            f"the federation in {superlink} is not running; start it with "
            f"{pasteable('fedhm', 'flower', 'up', '--folder', superlink)}"
        )
    if not folder.announcement.exists():
        raise FedhmError(f"the federation in {superlink} is still coming up; try again in some seconds")
    return folder.connection


def _opened(path: Path) -> IO[str]:
    try:
        with private_files():
            ours = path.exists() or not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            if ours:  # one that an earlier version made was open to everybody
                path.parent.chmod(0o700)
            return path.open("a+")
    except OSError as error:
        raise FedhmError(f"cannot make the folder {path.parent}: {error.strerror}") from None


def _lives(owner: str) -> bool:
    """Tell whether the process that a lock names is alive."""
    try:
        os.kill(int(json.loads(owner)["pid"]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True

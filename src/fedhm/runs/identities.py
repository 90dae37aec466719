"""The key of each client number, kept in the run's folder, so that no client can take another's number."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from fedhm.errors import FedhmError
from fedhm.machine.files import read_regular, write_atomically
from fedhm.runs.rounds import error_summary

IDENTITIES_FILE = "nodes.json"
# no checksum: an operator may remove the line of a client that got a new key
_Table = TypeAdapter(dict[Annotated[int, Field(ge=0)], Annotated[str, Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")]])


class Identities:
    """The numbers of clients and the fingerprints of their keys, for the whole run.

    The first client to claim a number gets it. A key has one number only: otherwise one client could collect the
    numbers of all that are late.
    """

    def __init__(self, keys: dict[int, str] | None = None) -> None:
        self._keys = keys or {}
        self._folder: Path | None = None  # None while the server waits for clients

    @classmethod
    def read(cls, folder: Path) -> "Identities":
        """Read the identities of a run that is resumed; a federation without keys has none."""
        file = folder / IDENTITIES_FILE
        try:
            keys = _Table.validate_json(read_regular(file)) if file.exists() else {}
            if len(set(keys.values())) < len(keys):
                raise ValueError("it gives two clients the same key")
        except (OSError, ValueError) as error:
            raise FedhmError(
                f"cannot read {file}: {error_summary(error)}; put it back, or remove it if all "
                "connected clients are the right ones: the numbers that they claim are then trusted"
            ) from None
        read = cls(keys)
        read._folder = folder
        return read

    def keep_in(self, folder: Path) -> None:
        """Write the identities to the folder of a new run, now and whenever one is added."""
        self._folder = folder
        self._write()

    def claim(self, client: int, key: str) -> str:
        """Assign a number to a key; return an error sentence if the number or the key is taken."""
        owner = self._keys.get(client, key)
        if owner != key:
            return f"it calls itself client {client}, which is the one with the key {owner}; its own is {key}"
        for other, taken in self._keys.items():
            if taken == key and other != client:
                return f"it calls itself client {client}, but its key {key} is that of client {other}"
        if client not in self._keys:
            self._keys[client] = key
            self._write()
        return ""

    def _write(self) -> None:
        if self._folder is not None and self._keys:
            write_atomically(
                self._folder / IDENTITIES_FILE, json.dumps(dict(sorted(self._keys.items())), indent=2) + "\n"
            )

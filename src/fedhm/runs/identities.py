"""Whose number is whose: the key that each client's number belongs to, kept in the run's folder."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.runs.records import error_summary

IDENTITIES_FILE = "nodes.json"
# no checksum: whoever runs the federation may take a line out, for a client that got another key
_Table = TypeAdapter(dict[Annotated[int, Field(ge=0)], Annotated[str, Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")]])


class Identities:
    """The numbers of clients and the keys that they belong to, by fingerprint. Both belong together for the whole run.

    The first to claim a number has it. A key has one number only: else one client could collect those of all that are
    late.
    """

    def __init__(self, keys: dict[int, str] | None = None) -> None:
        self._keys = keys or {}
        self._folder: Path | None = None  # none yet, while clients are waited for

    @classmethod
    def read(cls, folder: Path) -> "Identities":
        """Read those of a run that is resumed; a federation without keys has none."""
        file = folder / IDENTITIES_FILE
        try:
            keys = _Table.validate_json(file.read_bytes()) if file.exists() else {}
            if len(set(keys.values())) < len(keys):
                raise ValueError("it gives two clients the same key")
        except (OSError, ValueError) as error:
            raise FedhmError(
                f"cannot read {file}: {error_summary(error)}; put it back, or remove it if all clients that are "
                "connected are the right ones: they are then taken for what they say"
            ) from None
        read = cls(keys)
        read._folder = folder
        return read

    def keep_in(self, folder: Path) -> None:
        """Write what is known so far into the folder of a run that begins, and from now on all that is added."""
        self._folder = folder
        self._write()

    def claim(self, client: int, key: str) -> str:
        """Give a client's number to a key, unless it has it already; return why not, if one of them is taken."""
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

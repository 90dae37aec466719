"""What keeps a SuperLink on this machine to whoever started it: secrets in FLWR_HOME, that only its owner can read."""

import base64
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

OWNERS_ONLY = 0o077  # a umask


@dataclass(frozen=True)
class Secrets:
    """The secrets of one SuperLink, made anew whenever one is started."""

    home: Path

    @property
    def token(self) -> Path:
        """Return the file of the token that the control API asks for, by which runs are started and stopped."""
        return self.home / "control.token"

    @property
    def executor(self) -> Path:
        """Return the file of what the SuperLink and its executor share: nobody else is given the tasks of a run."""
        return self.home / "executor.secret"

    @property
    def ray(self) -> Path:
        """Return the file of the token that the processes of Ray ask each other for."""
        return self.home / "ray.token"

    def make(self, address: str) -> None:
        """Write new secrets, and for Flower's own command those that the SuperLink at `address` asks for."""
        token = secrets.token_urlsafe(32)
        names = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
        known = {f"flower.account-auth.{address}.{name}": _encoded(value) for name, value in names.items()}
        write_private(self.token, token.encode())
        write_private(self.executor, secrets.token_bytes(32))
        write_private(self.ray, secrets.token_hex(32).encode())
        write_private(self.home / "credentials.yaml", json.dumps(known).encode())  # JSON is YAML


def write_private(path: Path, content: bytes) -> None:
    """Write a file that nobody else can read at any moment."""
    with private_files():
        path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


@contextmanager
def private_files() -> Iterator[None]:
    """Have this process make files and folders that are its owner's only, while the context lasts."""
    before = os.umask(OWNERS_ONLY)
    try:
        yield
    finally:
        os.umask(before)


def current_umask() -> int:
    mask = os.umask(OWNERS_ONLY)  # which can only be read by setting it
    os.umask(mask)
    return mask


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()

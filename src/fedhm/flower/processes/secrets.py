"""Secrets, certificates and keys of a SuperLink on this machine, in files that only their owner can read.

The secrets keep other users of the machine out. The certificates and keys identify the SuperLink and its clients.
"""

import base64
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedhm.machine.files import write_atomically

OWNER_ONLY_UMASK = 0o077


@dataclass(frozen=True)
class Secrets:
    """The secrets of one SuperLink, in its FLWR_HOME; new ones for every start."""

    home: Path

    @property
    def token(self) -> Path:
        """Return the file of the token for the control API, which starts and stops runs."""
        return self.home / "control.token"

    @property
    def executor(self) -> Path:
        """Return the file of the secret that the SuperLink shares with its executor, which alone gets tasks of runs."""
        return self.home / "executor.secret"

    @property
    def ray(self) -> Path:
        """Return the file of the token by which the processes of Ray admit each other."""
        return self.home / "ray.token"

    def write(self, address: str) -> None:
        """Write new secrets, and the credentials with which Flower's own command reaches the SuperLink at `address`."""
        token = secrets.token_urlsafe(32)
        values = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
        credentials = {f"flower.account-auth.{address}.{name}": _base64(value) for name, value in values.items()}
        write_secret(self.token, token.encode())
        write_secret(self.executor, secrets.token_bytes(32))
        write_secret(self.ray, secrets.token_hex(32).encode())
        write_secret(self.home / "credentials.yaml", json.dumps(credentials).encode())  # JSON is YAML


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that no other user can read at any moment."""
    with owner_only_files():
        path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


@contextmanager
def owner_only_files() -> Iterator[None]:
    """Make files and folders of this process readable by their owner only, while the context lasts."""
    before = os.umask(OWNER_ONLY_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def current_umask() -> int:
    mask = os.umask(OWNER_ONLY_UMASK)  # it can only be read by setting it
    os.umask(mask)
    return mask


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# ---- certificates and keys ----

LIFETIME = timedelta(days=365)
RENEWED_BEFORE = timedelta(days=7)  # a deployment may stay up for days


def ensure_certificates(folder: Path) -> None:
    """Write `ca.crt`, `server.pem` and `server.key` for localhost, unless the folder has some that are still valid."""
    if all((folder / name).exists() for name in ("ca.crt", "server.pem", "server.key")) and _are_valid(folder):
        return
    authority_key, server_key = _new_key(), _new_key()
    authority_name, now = _name("fedhm flower up"), datetime.now(UTC)
    authority = (
        _unsigned(authority_name, authority_name, authority_key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ip_address(a)) for a in ("127.0.0.1", "::1"))]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    server = (
        _unsigned(_name("localhost"), authority_name, server_key, now)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    # The authority's own key is not kept: nobody can issue another certificate that these clients would trust.
    write_secret(folder / "server.key", _pem(server_key, PrivateFormat.PKCS8))
    write_atomically(folder / "server.pem", server.public_bytes(Encoding.PEM))
    write_atomically(folder / "ca.crt", authority.public_bytes(Encoding.PEM))


def ensure_client_key(path: Path) -> None:
    """Write `path` and `path.pub` as `ssh-keygen -t ecdsa -b 384` would, unless both exist."""
    public_path = path.with_name(path.name + ".pub")
    if path.exists() and public_path.exists():
        return
    key = _new_key()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_secret(path, _pem(key, PrivateFormat.OpenSSH))
    write_atomically(public_path, public + f" {path.name}\n".encode())


def _are_valid(folder: Path) -> bool:
    try:
        certificates = [x509.load_pem_x509_certificate((folder / n).read_bytes()) for n in ("ca.crt", "server.pem")]
    except ValueError:
        return False
    return all(c.not_valid_after_utc - RENEWED_BEFORE > datetime.now(UTC) for c in certificates)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )

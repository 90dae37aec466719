"""What keeps a SuperLink on this machine to whoever started it: secrets in FLWR_HOME, that only its owner can read."""

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


# Who is who in a federation on this machine: a certificate authority, its server certificate, and keys of clients.

LIFETIME = timedelta(days=365)
RENEWED_BEFORE = timedelta(days=7)  # a federation may stay up for days


def ensure_certificates(folder: Path) -> None:
    """Write `ca.crt`, `server.pem` and `server.key` for localhost, unless those in the folder last for some days."""
    if all((folder / name).exists() for name in ("ca.crt", "server.pem", "server.key")) and _lasts(folder):
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
    # The authority's own key is not kept: nobody can issue another certificate that these clients would believe.
    write_private(folder / "server.key", _pem(server_key, PrivateFormat.PKCS8))
    write_atomically(folder / "server.pem", server.public_bytes(Encoding.PEM))
    write_atomically(folder / "ca.crt", authority.public_bytes(Encoding.PEM))


def ensure_client_key(path: Path) -> None:
    """Write `path` and `path.pub` as `ssh-keygen -t ecdsa -b 384` would; a pair that exists stays."""
    public_path = path.with_name(path.name + ".pub")
    if path.exists() and public_path.exists():
        return
    key = _new_key()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_private(path, _pem(key, PrivateFormat.OpenSSH))
    write_atomically(public_path, public + f" {path.name}\n".encode())


def _lasts(folder: Path) -> bool:
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

import shutil
import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedhm.flower.processes import secrets as certificates
from fedhm.flower.processes.secrets import ensure_certificates, ensure_client_key


def shake_hands(server_folder: Path, trusted: Path, name: str) -> None:
    """A TLS handshake in memory; raises what a client's refusal raises."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(server_folder / "server.pem", server_folder / "server.key")
    client_context = ssl.create_default_context(cafile=str(trusted))
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    waiting = [client, server]
    while waiting:
        side = waiting.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(side)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_the_authority_has_signed_for_this_machine(tmp_path: Path, name: str) -> None:
    ensure_certificates(tmp_path)
    shake_hands(tmp_path, tmp_path / "ca.crt", name)


def test_other_names_and_other_authorities_are_refused(tmp_path: Path) -> None:
    ensure_certificates(tmp_path / "a")
    ensure_certificates(tmp_path / "b")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(tmp_path / "a", tmp_path / "a" / "ca.crt", "example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path / "a", tmp_path / "b" / "ca.crt", "localhost")


def test_only_the_owner_reads_private_files(tmp_path: Path) -> None:
    ensure_certificates(tmp_path)
    ensure_client_key(tmp_path / "client-0")
    assert mode(tmp_path / "server.key") == mode(tmp_path / "client-0") == 0o600


def test_certificates_are_kept_until_they_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def content() -> list[bytes]:
        return [(tmp_path / name).read_bytes() for name in ("ca.crt", "server.pem", "server.key")]

    ensure_certificates(tmp_path)
    first = content()
    ensure_certificates(tmp_path)
    assert content() == first

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # noqa: ARG003
            return datetime.now(UTC) + timedelta(days=360)

    monkeypatch.setattr(certificates, "datetime", Later)
    ensure_certificates(tmp_path)
    assert all(new != old for new, old in zip(content(), first, strict=True))


def test_a_client_key_is_as_ssh_keygen_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "client-0"
    ensure_client_key(path)
    private, written = load_ssh_private_key(path.read_bytes(), None), (tmp_path / "client-0.pub").read_text()
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert load_ssh_public_key(written.encode()) == private.public_key()
    if shutil.which("ssh-keygen"):
        shown = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True).stdout
        assert shown.split()[:2] == written.split()[:2]
    ensure_client_key(path)
    assert (tmp_path / "client-0.pub").read_text() == written

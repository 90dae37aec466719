"""The proxy of examples/flower-proxy, a real nginx before a real SuperLink: nodes reach only the fleet API."""

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import copy, which

import httpx
import pytest
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from node_config_app import make_app, read_answers

from fedhm.flower.processes.process import Process, free_ports
from fedhm.flower.processes.secrets import ensure_certificates, ensure_client_key, owner_only_files
from fedhm.flower.processes.superlink import (
    Connection,
    flwr_json,
    start_run,
    superlink_command,
    supernode_command,
    write_connection,
)
from flower_up import wait_until

ROOT = Path(__file__).parent.parent.parent
NGINX = which("nginx") or which("nginx", path=f"/usr/sbin:{ROOT}/.nginx/usr/sbin")  # `make nginx` unpacks the latter
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed; on Debian `make nginx` brings it for the tests"),
]
PROTOBUF = {"Content-Type": "application/protobuf"}


@dataclass
class ProxiedSuperLink:
    connection: Connection  # to the SuperLink itself
    superlink: int  # ports
    fleet: int
    control: int
    folder: Path

    def post(self, port: int, path: str, content: bytes = b"", certificate: bool = False) -> httpx.Response:
        trust = ssl.create_default_context(cafile=self.folder / "ca.crt")
        if certificate:
            trust.load_cert_chain(self.folder / "admin.pem", self.folder / "admin.key")
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, trust_env=False) as client:
            # a raw path: httpx itself would take out what leads elsewhere
            url = httpx.URL(f"https://127.0.0.1:{port}").copy_with(raw_path=path.encode())
            return client.send(client.build_request("POST", url, headers=PROTOBUF, content=content))


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedSuperLink]:
    folder = tmp_path_factory.mktemp("proxy")
    fleet, control, superlink = ports = free_ports(3)
    with owner_only_files():
        ensure_certificates(folder)
    make_admin(folder)
    text = (ROOT / "examples" / "flower-proxy" / "nginx.conf").read_text().replace("server.example", "localhost")
    for shipped, free in zip(("listen 8000 ", "listen 8001 ", "127.0.0.1:9000"), ports, strict=True):
        assert text.count(shipped) == 1
        text = text.replace(shipped, f"127.0.0.1:{free}" if ":" in shipped else f"listen 127.0.0.1:{free} ")
    (folder / "nginx.conf").write_text(text)
    (folder / "temp").mkdir()
    connection = Connection(folder / "flower", "ours")
    write_connection(connection, superlink, folder / "ca.crt")
    commands = {
        "superlink": superlink_command(superlink, folder, ["--database", str(folder / "state.db")]),
        "nginx": [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"],
    }
    with ExitStack() as stack:
        for (name, command), port in zip(commands.items(), (superlink, fleet), strict=True):
            stack.enter_context(Process(name, command, connection.home, folder / f"{name}.log")).wait_for_port(port)
        yield ProxiedSuperLink(connection, superlink, fleet, control, folder)


def make_admin(folder: Path) -> None:
    """Make a certificate authority for administrators, and the certificate of one."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes", "-days", "1"]
    ca = ["-x509", "-subj", "/CN=admins", "-keyout", "admins.key", "-out", "admins.crt"]
    own = ["-subj", "/CN=admin", "-keyout", "admin.key", "-out", "admin.csr"]
    sign = ["-req", "-in", "admin.csr", "-CA", "admins.crt", "-CAkey", "admins.key", "-CAcreateserial"]
    for command in (["req", *curve, *ca], ["req", *curve, *own], ["x509", *sign, "-out", "admin.pem"]):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/get-nodes",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol%2fstart-run",
        "/v1/fleet/%252e%252e/control/start-run",
        "//v1//control//start-run",
        "/v1/fleet/",
        "/openapi.json",
        "/",
    ],
)
def test_nodes_reach_the_fleet_api_only(proxied: ProxiedSuperLink, path: str) -> None:
    assert proxied.post(proxied.fleet, path).status_code == 403


def test_it_is_the_proxy_that_refuses(proxied: ProxiedSuperLink) -> None:
    """The SuperLink itself accepts every control request that reaches it. Flower requires signatures of nodes."""
    assert proxied.post(proxied.superlink, "/v1/control/list-nodes").status_code == 200
    assert proxied.post(proxied.fleet, "/v1/fleet/pull-messages").status_code == 401


def test_a_piece_of_a_large_object_fits(proxied: ProxiedSuperLink) -> None:
    assert (
        proxied.post(proxied.fleet, "/v1/fleet/push-object", bytes(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)).status_code
        != 413
    )
    assert proxied.post(proxied.fleet, "/v1/fleet/push-object", bytes(9 << 20)).status_code == 413


def test_the_control_api_asks_for_a_certificate(proxied: ProxiedSuperLink, tmp_path: Path) -> None:
    assert proxied.post(proxied.control, "/v1/control/list-nodes", certificate=True).status_code == 200
    assert proxied.post(proxied.control, "/v1/fleet/pull-messages", certificate=True).status_code == 403
    assert proxied.post(proxied.control, "/v1/control/list-nodes").status_code == 400
    make_admin(tmp_path)  # of another authority
    copy(proxied.folder / "ca.crt", tmp_path)
    stranger = ProxiedSuperLink(proxied.connection, proxied.superlink, proxied.fleet, proxied.control, tmp_path)
    assert stranger.post(proxied.control, "/v1/control/list-nodes", certificate=True).status_code == 400


def test_a_supernode_behind_the_proxy_does_its_work(proxied: ProxiedSuperLink, tmp_path: Path) -> None:
    key, (port,) = tmp_path / "client-0", free_ports(1)
    ensure_client_key(key)
    flwr_json(proxied.connection, "supernode", "register", f"{key}.pub")
    command = supernode_command(
        f"127.0.0.1:{proxied.fleet}", proxied.folder / "ca.crt", key, port, "partition-id=0 x=3"
    )
    with Process("SuperNode", command, tmp_path / "flower", tmp_path / "node.log"):
        given = {"nodes": 1, "answers": str(tmp_path / "answers.json")}
        start_run(proxied.connection, make_app(tmp_path / "app"), given)
        _, nodes = read_answers(tmp_path / "answers.json")
        assert nodes == [{"partition-id": 0, "x": 3}]
    wait_until(lambda: flwr_json(proxied.connection, "supernode", "list")["nodes"][0]["status"] == "offline", 60)

"""`fedhm flower up` with Flower's real processes: access is restricted, and no process stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from node_config_app import make_app, read_answers

from fedhm.errors import FedhmError
from fedhm.flower.deployment import DeploymentFolder, connection_of
from fedhm.flower.processes.process import Process, free_ports
from fedhm.flower.processes.secrets import ensure_client_key
from fedhm.flower.processes.superlink import flwr_json, run_status, start_run, stop_run, supernode_command
from fedhm.flower.processes.supervisor import descendants
from flower_up import Up, command, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # not asked for this machine
AWKWARD = """a "quoted" and 'quoted' text\n= with lines, é, and an end like a file's.toml"""


def statuses(folder: Path) -> list[str]:
    return sorted(node["status"] for node in flwr_json(connection_of(str(folder)), "supernode", "list")["nodes"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up") / "federation"


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[Up]:
    with Up(folder, 2, "--tiers", "full", "1/4") as started:
        yield started.wait()


def test_it_comes_up_and_prints_how_to_use_it(up: Up) -> None:
    assert statuses(up.folder) == ["online", "online"]
    assert f"fedhm run digits --set engine.name=flower engine.superlink={up.folder} federation.clients=2" in up.said
    assert f"flwr supernode register {up.folder}/keys/client-0.pub federation" in up.said
    assert f"flower-superlink --ssl-ca-certfile {up.folder}/certificates/ca.crt" in up.said


def test_all_processes_listen_on_the_loopback_only(up: Up) -> None:
    sockets = {str(fd.readlink()) for pid in descendants(up.process.pid) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for n in ("tcp", "tcp6") for line in Path(f"/proc/net/{n}").read_text().splitlines()[1:]]
    listening = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    assert listening == ["0100007F"] * 3  # the SuperLink and two SuperNodes, on 127.0.0.1


def test_a_second_federation_in_the_same_folder_is_refused(up: Up) -> None:
    second = [sys.executable, "-m", "fedhm", *command(up.folder, 2)]
    done = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (f"fedhm: a federation runs in {up.folder} already; end it, or name another --folder\n")
    assert statuses(up.folder) == ["online", "online"]


def test_nodes_without_a_registered_key_or_without_tls_are_refused(up: Up, tmp_path: Path) -> None:
    folder, ports = DeploymentFolder(up.folder), free_ports(3)
    address = json.loads(folder.announcement.read_text())["address"]
    authority, key = folder.certificates / "ca.crt", tmp_path / "unknown"
    ensure_client_key(key)
    unknown = supernode_command(address, authority, key, ports[0], "partition-id=0")
    keyless = supernode_command(address, authority, key, ports[1], "partition-id=0")
    place = keyless.index("--auth-supernode-private-key")
    del keyless[place : place + 2]
    plain = [*supernode_command(address, None, key, ports[2], "partition-id=0"), "--max-retries", "2"]
    refusals = {
        "unknown": (unknown, r"\[code: 2004\] Failed to activate SuperNode"),
        "keyless": (keyless, r"\[code: \d+\]"),
        "plain": (plain, "disconnected without sending a response|Connection reset by peer"),  # TLS hangs up
    }
    with ExitStack() as stack:
        started = {}
        for name, (line, _) in refusals.items():
            started[name] = Process(name, line, tmp_path / "flower", tmp_path / f"{name}.log")
            stack.enter_context(started[name])
        wait_until(lambda: not any(process.alive for process in started.values()), 90)
    for name, process in started.items():
        said = process.log.read_text()
        assert "Failed to initialize the connection to the SuperLink" in said
        assert re.search(refusals[name][1], process.last_log_line), said
        assert "SuperNode ID" not in said
    assert statuses(up.folder) == ["online", "online"]


def test_a_run_gets_its_settings_and_clients_their_node_config(up: Up, tmp_path: Path) -> None:
    connection, app = connection_of(str(up.folder)), make_app(tmp_path / "app")
    with pytest.raises(FedhmError, match=r"^'flwr run' failed: .*Invalid run configuration[^\n]*$"):
        start_run(connection, app, {"unheard-of": 1})
    given = {"text": AWKWARD, "number": 0.5, "nodes": 2, "wait": 60, "answers": str(tmp_path / "answers.json")}
    run = start_run(connection, app, given)
    settings, nodes = read_answers(tmp_path / "answers.json")
    assert run_status(connection, run) == "running"
    assert settings == given
    assert nodes == [
        {"partition-id": 0, "num-partitions": 2, "tier": "full"},
        {"partition-id": 1, "num-partitions": 2, "tier": "1/4"},
    ]
    stop_run(connection, run)
    assert run_status(connection, run) == "finished:stopped"
    stop_run(connection, run)  # has ended already
    with pytest.raises(FedhmError, match=r"^'flwr list' failed: .*Run ID not found[^\n]*$"):
        run_status(connection, 5)


def test_a_dead_supernode_is_reported_and_the_others_go_on(up: Up) -> None:
    key = f"{up.folder}/keys/client-1"
    os.kill(up.pid_of(f"flower-supernode --auth-supernode-private-key {key}"), signal.SIGTERM)
    wait_until(lambda: "SuperNode 1 ended, the others go on: " in up.said, 30)
    assert statuses(up.folder) == ["offline", "online"]
    assert up.process.poll() is None


def test_ctrl_c_ends_all_processes(up: Up) -> None:
    assert up.end(signal.SIGINT) == 0
    with pytest.raises(FedhmError, match=r"^the federation in .* is not running"):
        connection_of(str(up.folder))


def test_it_comes_up_again_after_it_was_killed(up: Up, folder: Path) -> None:
    assert up.process.poll() is not None
    keys = (folder / "keys" / "client-0").read_bytes()
    with Up(folder, 2) as again:
        again.wait()
        assert statuses(folder) == ["online", "online"]
        assert again.end(signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises(FedhmError, match=r"^the federation in .* is not running"):
        connection_of(str(folder))
    with Up(folder, 2) as once_more:
        once_more.wait()
        assert statuses(folder) == ["online", "online"]
        assert (folder / "keys" / "client-0").read_bytes() == keys
        below = list(descendants(once_more.process.pid))
        os.kill(once_more.pid_of("flower-superlink"), signal.SIGKILL)
        assert once_more.process.wait(60) == 1
    assert "fedhm: the SuperLink ended: " in once_more.said
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 60)


def test_it_can_be_interrupted_while_it_comes_up(tmp_path: Path) -> None:
    with Up(tmp_path / "federation", 2, "--insecure") as started:
        wait_until(lambda: len(list(descendants(started.process.pid))) > 1, 60)  # a supervisor, and what it holds
        assert started.end(signal.SIGINT) == 130
    assert started.said.endswith("fedhm: stopped\n")

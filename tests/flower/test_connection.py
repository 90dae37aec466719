import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedhm.errors import FedhmError
from fedhm.flower.deployment import DeploymentFolder, connection_of
from fedhm.flower.processes.process import Process, check_port, environment, free_ports, replaced_commands
from fedhm.flower.processes.superlink import Connection, flwr, flwr_json, write_connection


def test_importing_the_library_imports_no_flower() -> None:
    code = "import sys, fedhm, fedhm.cli; print([m for m in ('flwr', 'cryptography', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_named_connection_is_looked_up_in_flowers_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedhmError, match="'mine' is neither the folder of a 'fedhm flower up' nor a SuperLink in"):
        connection_of("mine")
    write_connection(Connection(tmp_path, "mine"), 9, None)
    assert connection_of("mine") == Connection(tmp_path, "mine")
    with pytest.raises(FedhmError, match="which has mine: start one with 'fedhm flower up --folder yours' in"):
        connection_of("yours")
    (tmp_path / "config.toml").write_text("[superlink")
    with pytest.raises(FedhmError, match="is damaged"):
        connection_of("mine")


def test_a_folder_without_a_running_federation_is_an_error(tmp_path: Path) -> None:
    folder = DeploymentFolder(tmp_path)
    with folder.locked():
        with pytest.raises(FedhmError, match="still coming up"):
            connection_of(str(tmp_path))
        folder.announce("127.0.0.1:9", 2)
        assert connection_of(str(tmp_path)) == folder.connection
        with pytest.raises(FedhmError, match=r"a federation runs in .* already"), folder.locked():
            pass
    with pytest.raises(FedhmError, match="is not running"):
        connection_of(str(tmp_path))
    with folder.locked():  # and again
        assert folder.is_running


def test_an_unreachable_superlink_is_one_sentence(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    connection = Connection(tmp_path, "gone")
    write_connection(connection, port, None)
    with pytest.raises(
        FedhmError, match=r"^'flwr supernode' failed: Connection to the SuperLink is unavailable[^\n]*$"
    ):
        flwr_json(connection, "supernode", "list")
    with pytest.raises(FedhmError, match=r"^'flwr list' failed: [^\n│]*connection 'other' not found[^\n│]*$"):
        flwr(Connection(tmp_path, "other"), "list")


def test_ports_are_free_and_a_taken_one_is_refused() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        check_port(port)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(FedhmError, match="Address already in use"):
        check_port(taken.getsockname()[1])


@pytest.mark.slow
def test_the_error_of_a_process_that_fails_to_start_is_shown(tmp_path: Path) -> None:
    process = Process("the SuperLink", ["flower-superlink", "--port", "x"], tmp_path, tmp_path / "log")
    with pytest.raises(FedhmError, match=r"^the SuperLink ended: .*argument --port: invalid.*$"):
        process.wait_for_port(free_ports(1)[0])
    process.stop()


def test_commands_run_offline_and_are_found_beside_this_python(tmp_path: Path) -> None:
    given = environment(tmp_path)
    assert given["PATH"].split(os.pathsep)[:2] == [str(replaced_commands(tmp_path)), str(Path(sys.executable).parent)]
    assert (given["FLWR_TELEMETRY_ENABLED"], given["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert (given["RAY_USAGE_STATS_ENABLED"], given["FLWR_HOME"]) == ("0", str(tmp_path))

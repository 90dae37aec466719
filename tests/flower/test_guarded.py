"""Other users of a machine can reach a SuperLink's ports, but none lets a stranger in. A dead executor is noticed."""

import os
import signal
import ssl
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fedhm.errors import FedhmError
from fedhm.flower.deployment import DeploymentFolder
from fedhm.flower.processes.guarded_superlink import TokenAccount
from fedhm.flower.processes.secrets import Secrets, current_umask, owner_only_files
from fedhm.flower.processes.superlink import Connection, flwr_json, simulation_superlink
from fedhm.flower.processes.supervisor import descendants
from fedhm.flower.submit import _watch
from flower_up import Up, is_run_by, wait_until

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    "given", [[], [("flwr-oidc-access-token", "")], [("flwr-oidc-access-token", "secre")], [("x", "secret")]]
)
def test_other_tokens_are_refused(given: list[tuple[str, str]]) -> None:
    assert TokenAccount("secret").validate_tokens_in_metadata(given) == (False, None)
    assert TokenAccount("").validate_tokens_in_metadata(given) == (False, None)


def test_the_token_is_accepted() -> None:
    valid, account = TokenAccount("secret").validate_tokens_in_metadata([("flwr-oidc-access-token", "secret")])
    assert valid
    assert account is not None
    assert TokenAccount("secret").refresh_tokens([]) == (None, None)


def test_secrets_are_readable_by_their_owner_only_and_new_each_time(tmp_path: Path) -> None:
    secrets, before = Secrets(tmp_path / "new" / "home"), current_umask()
    secrets.write("127.0.0.1:1")
    made = {path: path.read_bytes() for path in secrets.home.iterdir()}
    assert len(made) == 4
    assert {mode(path) for path in made} == {0o600}
    assert mode(secrets.home) == mode(secrets.home.parent) == 0o700
    secrets.write("127.0.0.1:1")
    assert all(path.read_bytes() != content for path, content in made.items())
    with owner_only_files():
        assert current_umask() == 0o077
    assert current_umask() == before


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    with simulation_superlink(tmp_path_factory.mktemp("guarded") / "superlink") as connection:
        yield connection


@pytest.mark.slow
@needs_proc
def test_a_simulation_takes_runs_from_its_owner_only(simulation: Connection, tmp_path: Path) -> None:
    assert flwr_json(simulation, "list")["runs"] == []
    stranger = Connection(tmp_path, simulation.name)
    (tmp_path / "config.toml").write_bytes((simulation.home / "config.toml").read_bytes())
    with pytest.raises(FedhmError, match=r"^'flwr list' failed: .*[Aa]uthenticat"):
        flwr_json(stranger, "list")
    (address,) = [
        line.split('"')[1] for line in (tmp_path / "config.toml").read_text().splitlines() if "address" in line
    ]
    trusted = ssl.create_default_context(cafile=simulation.home.parent / "certificates" / "ca.crt")
    with httpx.Client(base_url=f"https://{address}", verify=trusted, trust_env=False) as client:
        for path in ("control/start-run", "control/stop-run", "control/list-runs", "runtime/acquire-task"):
            answer = client.post(f"/v1/{path}", headers={"Content-Type": "application/protobuf"}, content=b"")
            assert answer.status_code in (401, 403), (path, answer.text)


@pytest.mark.slow
@needs_proc
def test_files_of_flowers_processes_are_readable_by_their_owner_only(simulation: Connection) -> None:
    for path in (simulation.home.parent, *simulation.home.parent.rglob("*")):
        assert not mode(path) & 0o077, path


@pytest.mark.slow
@needs_proc
def test_a_dead_executor_ends_the_wait_for_a_run(simulation: Connection, tmp_path: Path) -> None:
    """Must be the last test of this fixture: no run would start any more."""
    (executor,) = [pid for pid in descendants(os.getpid()) if is_run_by(pid, "flower-superexec")]
    os.kill(executor, signal.SIGKILL)
    wait_until(lambda: not simulation.processes[1].alive, 30)
    with pytest.raises(FedhmError, match=r"^the SuperLink's executor ended: .* \(.*executor\.log\)$"):
        _watch(simulation, 1, tmp_path / "status.json", tmp_path / "run", None, print)  # type: ignore[arg-type]


def test_a_new_folder_is_readable_by_its_owner_only_and_existing_ones_keep_their_mode(tmp_path: Path) -> None:
    with DeploymentFolder(tmp_path / "new").locked():
        assert mode(tmp_path / "new") == 0o700
    (tmp_path / "new").chmod(0o755)  # as an earlier version made it
    with DeploymentFolder(tmp_path / "new").locked():
        assert mode(tmp_path / "new") == 0o700
    (tmp_path / "others").mkdir(mode=0o755)
    with DeploymentFolder(tmp_path / "others").locked():
        assert mode(tmp_path / "others") == 0o755


@pytest.mark.slow
@needs_proc
def test_a_federation_takes_runs_from_its_owner_only_and_ends_with_its_executor(tmp_path: Path) -> None:
    with Up(tmp_path / "federation", 1, "--insecure") as up:
        up.wait()
        for path in (up.folder, *up.folder.rglob("*")):
            assert not mode(path) & 0o077, path
        stranger = Connection(tmp_path, "federation")
        (tmp_path / "config.toml").write_bytes((up.folder / "flower" / "config.toml").read_bytes())
        with pytest.raises(FedhmError, match=r"^'flwr list' failed: .*[Aa]uthenticat"):
            flwr_json(stranger, "list")
        os.kill(up.pid_of("flower-superexec --superexec-auth-secret-file"), signal.SIGKILL)
        assert up.process.wait(60) == 1
    assert "fedhm: the SuperLink's executor ended: " in up.said

"""Runs on SuperNodes with TLS and keys, with real processes: a failing client costs only its own updates."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from faulty import task

import forked
from fedhm.assembly import assemble
from fedhm.cli import main
from fedhm.config.loading import load_config, parse, parse_flat
from fedhm.data.federation import from_arrays
from fedhm.engines.engine import Engine
from fedhm.flower.clients import UserModel
from fedhm.flower.deployment import DeploymentFolder, connection_of
from fedhm.flower.nodes import fingerprint
from fedhm.flower.processes.process import Process, free_ports
from fedhm.flower.processes.secrets import ensure_client_key
from fedhm.flower.processes.superlink import flwr_json, run_status, start_run, supernode_command
from fedhm.run import prepare
from fedhm.runs.folder import RunFolder
from fedhm.runs.models import load_tier
from fedhm.runs.rounds import read_records
from fedhm.server.record import Record
from fedhm.server.sampling import sample_participants
from fedhm.work.messages import Failure, Reply, Task
from flower_up import Up, not_ignoring_ctrl_c, wait_until
from run_outcome import weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
APPS = Path(__file__).parent / "apps"
FAULTS = {"1 0": "raise", "1 1": "NaN", "1 2": "rank", "2 0": "hang", "2 1": "die"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("deployment") / "federation", 4) as started:
        yield started.wait()
        started.end()


def test_a_server_that_is_killed_resumes_on_the_same_supernodes(up: Up, tmp_path: Path) -> None:
    out = tmp_path / "run"
    changes = ["data.train_samples=240", "federation.clients=2", "federation.participation=1.0", "train.rounds=2"]
    changes += ["evaluation.every=2", "engine.threads=1", "engine.server_threads=1"]
    flower = [*changes, "engine.name=flower", f"engine.superlink={up.folder}"]
    command = ["run", "digits", "--set", *flower, "--out", str(out)]
    with forked.fedhm(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: len(read_records(out / "records.jsonl")) >= 1 or process.poll() is not None)
            os.kill(up.pid_of("flwr-serverapp"), signal.SIGKILL)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    expected = f"fedhm: the run's server process died; 'fedhm resume {out}' resumes from the last complete round\n"
    assert said == expected

    kept = json.loads((out / "nodes.json").read_text())
    assert kept == {str(client): fingerprint(public_key(up, client)) for client in range(2)}
    nodes = supernodes(up)
    assert main(["resume", str(out)]) == 0
    assert supernodes(up) == nodes  # the same ones, still connected
    config = load_config("digits", changes).resolved()
    with RunFolder.create(tmp_path / "local", config) as folder:
        prepare(config).run(folder)
    for path in (tmp_path / "local" / "models").iterdir():
        assert weights(path) == weights(out / "models" / path.name), path.name
    assert [record.round for record in read_records(out / "records.jsonl")] == [1, 2]


def test_a_round_without_updates_is_repeated_with_other_clients(up: Up, tmp_path: Path) -> None:
    out, connection = tmp_path / "run", connection_of(str(up.folder))
    changes = {"federation.participation": 0.5, "train.rounds": 1, "out": str(out)}
    config = parse({"federation": {"clients": 4, "participation": 0.5}}, "test").federation
    first, second = islice(sample_participants(config, 4, ["full", "1/2"], 0, 1), 2)
    faults = {f"1 {participant.client}": "raise" for participant in first}
    start_run(connection, APPS / "faults", {**changes, "faults": json.dumps(faults)})
    wait_until((out / "report.md").exists, 400)
    (record,) = read_records(out / "records.jsonl")
    assert record.attempts == 2
    assert record.participants == second
    assert set(reasons(record)) == {participant.client for participant in first}


def test_a_run_begins_without_a_supernode_that_joins_later(up: Up, tmp_path: Path) -> None:
    out, folder = tmp_path / "run", DeploymentFolder(up.folder.absolute())
    changes = ["data.train_samples=250", "federation.clients=5", "federation.participation=1.0", "train.rounds=60"]
    changes += ["evaluation.every=60", "engine.threads=1", "engine.patience=20", "engine.name=flower"]
    command = ["run", "digits", "--set", *changes, f"engine.superlink={up.folder}", "--out", str(out)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with forked.fedhm(command, not_ignoring_ctrl_c, **streams) as process, ExitStack() as stack:
        stack.callback(process.kill)
        wait_until(lambda: read_records(out / "records.jsonl") or process.poll() is not None)
        assert process.poll() is None
        node = start_supernode(folder, 4, 'partition-id=4 num-partitions=5 tier="1/8"')
        stack.callback(node.stop)
        wait_until(lambda: 4 not in reasons(read_records(out / "records.jsonl")[-1]) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    begins = "the run begins without 1 of 5 clients, which may join later: no SuperNode has partition-id 4"
    assert begins in " ".join(said.split())  # which breaks lines
    first, *_, last = read_records(out / "records.jsonl")
    assert reasons(first) == {4: "it is not connected"}
    assert reasons(last) == {}
    assert last.participants[4].tier == "1/8"


def test_clients_that_fail_cost_only_their_updates(up: Up, tmp_path: Path) -> None:
    """They raise, send unusable tensors, hang and die. In the last round a SuperNode is killed."""
    out, connection = tmp_path / "run", connection_of(str(up.folder))
    run_id = start_run(connection, APPS / "faults", {"faults": json.dumps(FAULTS), "out": str(out)})
    wait_until(lambda: len(read_records(out / "records.jsonl")) == 1, 400)
    (node,) = [pid for pid in up.pids_of("flower-supernode") if "partition-id=2" in command_line(pid)]
    os.kill(node, signal.SIGKILL)
    wait_until((out / "report.md").exists, 400)
    wait_until(lambda: run_status(connection, run_id) == "finished:completed", 60)
    assert tomllib.loads((out / "config.toml").read_text())["server"]["robust"] == "agreement"  # nodes may be hostile
    first, second = (reasons(record) for record in read_records(out / "records.jsonl"))
    assert set(first) == {0, 1, 2}
    assert first[0] == "its ClientApp raised an exception: the disk is full"
    assert "holds NaN or infinite values" in first[1]
    assert "has shape (1,) instead of (48, 12)" in first[2]
    assert set(second) == {0, 1, 2}
    assert second[0] == "it did not answer within 60 s (engine.deadline)"
    assert second[1] in ("its process died", second[0])
    assert second[2] in ("it is not connected", "it is not connected any more", second[0])

    network = load_tier(out / "models" / "full.safetensors", UserModel(task.build_model, 0).build())
    for name, tensor in weights_without_failed_clients().items():
        assert torch.equal(network.state_dict()[name], tensor), name


def start_supernode(folder: DeploymentFolder, client: int, config: str) -> Process:
    """Start one more SuperNode of a federation, with a key of its own."""
    key, (port,) = folder.key(client), free_ports(1)
    ensure_client_key(key)
    flwr_json(folder.connection, "supernode", "register", f"{key}.pub")
    address = json.loads(folder.announcement.read_text())["address"]
    command = supernode_command(address, folder.certificates / "ca.crt", key, port, config)
    return Process(f"SuperNode {client}", command, folder.connection.home, folder.log(f"client-{client}"))


def weights_without_failed_clients() -> dict[str, torch.Tensor]:
    """Return the weights of the same run by the local engine, where failed clients do not answer."""
    settings = tomllib.loads((APPS / "faults" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    sections = ("federation", "train", "method", "evaluation")
    given = {f"{section}.{key}": value for section in sections for key, value in settings[section].items()}
    config = parse_flat({**given, "train.on_bad_update": "drop", "engine.workers": 1}, "test")
    federation = from_arrays([task.samples(client) for client in range(4)], task.samples(100))
    model = UserModel(task.build_model, 0).build()
    honest = assemble(model, federation, config).engine
    return assemble(model, federation, config, Failing(honest)).run().networks["full"].state_dict()


class Failing:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        listed = list(tasks)
        for reply in self._engine.run(listed):
            fails = f"{listed[reply.position].round} {reply.client}" in {*FAULTS, "2 2"}
            yield Failure(reply.client, "it fails", reply.position) if fails else reply

    def close(self) -> None:
        self._engine.close()


def public_key(up: Up, client: int) -> bytes:
    """Return the key in the form that Flower passes on."""
    key = load_ssh_public_key(Path(f"{DeploymentFolder(up.folder).key(client)}.pub").read_bytes())
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def supernodes(up: Up) -> list[tuple[str, str]]:
    nodes = flwr_json(connection_of(str(up.folder)), "supernode", "list")["nodes"]
    return sorted((node["node-id"], node["status"]) for node in nodes)


def reasons(record: Record) -> dict[int, str]:
    return {each["client"]: each["reason"] for each in record.dropped}

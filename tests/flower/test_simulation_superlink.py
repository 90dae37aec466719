"""A simulation's SuperLink, and Ray below it, end with the context."""

import os
import sys
from pathlib import Path

import pytest
from asking_app import an_app, answered

from fedhm.flower.processes.connection import status, submit
from fedhm.flower.processes.superlink import simulation_superlink
from fedhm.flower.processes.supervisor import descendants

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]


def test_it_runs_an_app_on_simulated_clients_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    with simulation_superlink(tmp_path / "flower") as connection:
        federation, answers = "num-supernodes=3 client-resources-num-cpus=1", tmp_path / "answers.json"
        settings = {"nodes": 3, "wait": 60, "answers": str(answers)}
        run = submit(connection, an_app(tmp_path / "app"), settings, federation)
        _, nodes = answered(answers)
        assert [node["partition-id"] for node in nodes] == [0, 1, 2]
        assert status(connection, run) == "running"
        below = set(descendants(os.getpid())) - before
        assert any("raylet" in Path(f"/proc/{pid}/cmdline").read_text() for pid in below)
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]

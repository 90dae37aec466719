"""Forked processes run their commands, have their own names, and end with the executor."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedhm.flower.processes import forking_executor
from fedhm.flower.processes.process import executable, replaced_commands
from fedhm.flower.processes.superlink import install_forking_executor
from flower_up import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Flower's own executor is run")

EXECUTOR = """
import runpy, subprocess, sys, time
forks = runpy.run_path(sys.argv[1])["ForkServer"]()
forks.start(["sh", "-c", "echo loud; echo $PPID > forked"])
forks.start(["sh", "-c", "echo silent; touch second"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
sys.stdin.read()
"""


def test_commands_are_forks_of_one_process_that_ends_with_the_executor(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXECUTOR, forking_executor.__file__]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as executor:
        wait_until(lambda: (tmp_path / "second").exists() and (tmp_path / "forked").read_text().strip(), 60)
        forks = Path(f"/proc/{(tmp_path / 'forked').read_text().strip()}")
        assert (forks / "comm").read_text() == "fedhm-forks\n"
        assert f"\nPPid:\t{executor.pid}\n" in (forks / "status").read_text()
        said, _ = executor.communicate(timeout=60)
    assert said == "loud\n"
    wait_until(lambda: not forks.exists(), 60)


LEARNS_IMPORTS = """
import importlib.util, pathlib, sys, time
spec = importlib.util.spec_from_file_location("ready", sys.argv[1])
ready = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ready)
ready.LEARNED = ("wave",)
said = pathlib.Path("said")

def run():
    with said.open("a") as file:
        print("wave" in sys.modules, file=file)
    import wave

ready._import_command = lambda _: run
forks = ready.ForkServer()
until = time.monotonic() + 60
while not (said.exists() and "True" in said.read_text()) and time.monotonic() < until:
    forks.start(["flwr-clientapp"])
    time.sleep(0.1)
"""


def test_imports_of_one_process_are_ready_in_the_next(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", LEARNS_IMPORTS, forking_executor.__file__], cwd=tmp_path, check=True, timeout=120
    )
    first, *_, last = (tmp_path / "said").read_text().split()
    assert (first, last) == ("False", "True")


def test_commands_of_apps_are_preloaded_and_others_are_not() -> None:
    assert all(callable(forking_executor._import_command(name)) for name in forking_executor.PRELOADED)
    assert forking_executor._import_command("flwr-simulation") is None
    assert forking_executor._import_command("no-such-command") is None


@pytest.mark.slow
def test_flower_finds_this_executor_in_place_of_its_own(tmp_path: Path) -> None:
    own = Path(executable("flower-superexec", tmp_path))
    install_forking_executor(tmp_path)
    assert Path(executable("flower-superexec", tmp_path)) == replaced_commands(tmp_path) / "flower-superexec" != own
    assert (replaced_commands(tmp_path) / "flower-superexec").stat().st_mode & 0o777 == 0o700
    said = subprocess.check_output([executable("flower-superexec", tmp_path), "--version"], text=True)
    assert said.startswith("Flower version: 1.41")

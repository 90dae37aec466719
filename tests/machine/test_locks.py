"""One process at a time writes a run's folder, however the one before it ended, and on systems without fork too."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import small_config
from fedhm.errors import FedhmError
from fedhm.machine.files import is_locked, take_lock
from fedhm.runs.folder import RunFolder

HOLDER = """
import os, sys, time
from pathlib import Path
from fedhm.runs.folder import RunFolder
with RunFolder.open(Path(sys.argv[1])):
    worker = os.fork()
    if worker:
        print(worker, flush=True)
    time.sleep(300)
"""

# Stands in for Windows, which lacks what is taken away here.
WITHOUT_FORK = """
import os, sys, warnings
sys.modules["fcntl"] = None
del os.fork
opened = os.open
def open_file(path, *rest, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return opened(path, *rest, **named)
os.open = open_file
warnings.filterwarnings("ignore", "only soft file lock is available")

from pathlib import Path
import torch
import fedhm
from fedhm.cli import main
from fedhm.runs.folder import RunFolder

folder = Path(sys.argv[1])
torch.manual_seed(0)
samples = [(torch.rand(8, 1, 4, 4), torch.arange(8) % 2) for _ in range(3)]
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
config = {"train": {"rounds": 2, "epochs": 1, "batch": 4}, "method": {"tiers": [1.0, 0.25], "keep": 0}}
result = fedhm.run(model, samples[:2], samples[2], config, folder / "own")
assert len(result.records) == 2
with RunFolder.open(folder / "own"):
    try:
        RunFolder.open(folder / "own")
    except fedhm.FedhmError as error:
        print(error)
settings = ["train.rounds=1", "train.epochs=1", "model.width=0.25", "federation.clients=2"]
assert main(["run", "digits", "--set", *settings, "--out", str(folder / "preset")]) == 0
assert main(["resume", str(folder / "preset")]) == 0
assert main(["run", "digits", "--set", *settings, "train.lr=1e30", "--out", str(folder / "none")]) == 1
"""


def test_a_lock_is_taken_once_and_again_when_it_is_free(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "lock")
    lock = take_lock(tmp_path / "lock")
    assert lock is not None
    assert is_locked(tmp_path / "lock")
    assert take_lock(tmp_path / "lock", wait=0.1) is None
    lock.release()
    assert not is_locked(tmp_path / "lock")


def test_a_folder_with_nothing_but_a_lock_is_free(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / ".lock")
    assert lock is not None
    lock.release()
    RunFolder.check_free(tmp_path)
    with RunFolder.create(tmp_path, small_config()) as folder:
        folder.remove_if_no_round_done()
    assert not tmp_path.exists()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_killed_process_leaves_no_lock_even_if_its_children_live(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, small_config()):
        pass
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(FedhmError, match=f"^another process is running in {tmp_path}$"):
                RunFolder.open(tmp_path)
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # lives
            with RunFolder.open(tmp_path):
                pass
        finally:
            holder.kill()
            os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_runs_and_the_command_line_need_neither_fcntl_nor_fork(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_FORK, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert f"another process is running in {tmp_path / 'own'}" in ran.stdout
    assert "its loss became NaN" in ran.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"own", "preset"}

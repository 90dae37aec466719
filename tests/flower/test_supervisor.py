"""All processes that a command starts end with it. Real processes, some of which resist."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedhm.flower.processes import supervisor
from fedhm.flower.processes.supervisor import descendants

SCRIPT = supervisor.__file__
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # an orphan in a session of its own
        time.sleep(300)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(300)
"""


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def supervised(code: str, linger: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, SCRIPT, str(os.getpid()), str(linger), "--", sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.mark.slow
def test_sigterm_ends_all_processes() -> None:
    with supervised(STUBBORN) as process:
        assert process.stdout
        process.stdout.readline()
        wait_until(lambda: len(list(descendants(process.pid))) == 2)
        pids = list(descendants(process.pid))
        process.terminate()
        assert process.wait(15) == 0
        assert gone(pids)


def test_orphans_of_a_command_end_with_it() -> None:
    code = """
import os, time
told, tell = os.pipe()  # the command must not end before its child has said who it is
if os.fork() == 0: os.setsid(); print(os.getpid(), flush=True); os.write(tell, b"."); time.sleep(300)
os.read(told, 1); os._exit(3)
"""
    with supervised(code) as process:
        assert process.stdout
        orphan = int(process.stdout.readline())
        assert process.wait(15) == 3
        assert gone([orphan])


def a_parent(linger: float, code: str) -> subprocess.Popen[str]:
    command = ["--", sys.executable, "-c", code]
    parent = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, {SCRIPT!r}, str(os.getpid()), "{linger}", *{command!r}])
time.sleep(300)
"""
    return subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.DEVNULL, text=True)


@pytest.mark.slow
def test_a_killed_parent_takes_all_with_it() -> None:
    with a_parent(0, STUBBORN) as process:
        wait_until(lambda: len(list(descendants(process.pid))) == 3)
        pids = list(descendants(process.pid))
        process.kill()
    wait_until(lambda: gone(pids))


def test_a_killed_supervisor_takes_its_command_with_it() -> None:
    with supervised("import time; print(1, flush=True); time.sleep(300)") as process:
        assert process.stdout
        process.stdout.readline()
        pids = list(descendants(process.pid))
        process.kill()
    wait_until(lambda: gone(pids))


@pytest.mark.slow
def test_a_lingering_command_outlives_its_parent_for_a_while() -> None:
    with a_parent(2, "import time; time.sleep(300)") as process:
        wait_until(lambda: len(list(descendants(process.pid))) == 2)
        pids = list(descendants(process.pid))
        process.kill()
    ended = time.monotonic()
    wait_until(lambda: gone(pids))
    assert time.monotonic() - ended > 1.5


def test_it_imports_nothing_heavy() -> None:
    code = f"import runpy, sys; runpy.run_path({SCRIPT!r}); print([m for m in ('torch', 'fedhm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

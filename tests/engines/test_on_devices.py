"""Runs the tests in `on_device.py` in a process of their own.

Torch's backward pass looks for devices once in a process, at its first use. So the pretended device must be registered
before, and a process that has used it cannot fork workers any more, which other tests do.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("on_device.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tests_on_a_pretended_device_pass() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout

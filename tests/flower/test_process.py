"""The line of a process's log that explains why it ended, wherever it stands."""

import time
from pathlib import Path

import pytest

from fedhm.flower.processes.process import Process

pytest.importorskip("flwr")

ENDED = "Server disconnected without sending a response."
RETRY = "\x1b[93mWARNING \x1b[0m:   Connection attempt failed, retrying in 0.55 seconds"
INFO = "\x1b[92mINFO \x1b[0m:      SuperExec terminated gracefully."


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((INFO, RETRY, ENDED, INFO), ENDED),
        ((INFO, ENDED, RETRY, INFO), ENDED),  # a process that the node had started still asks for it
        ((INFO, RETRY, INFO), "WARNING :   Connection attempt failed, retrying in 0.55 seconds"),
        ((INFO,), "INFO :      SuperExec terminated gracefully."),
        ((), "(nothing)"),
    ],
)
def test_the_line_that_explains_the_end_is_found(lines: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.write_text("".join(f"{line}\n" for line in lines))
    process = Process("node", ["cat", str(said)], tmp_path / "flower", tmp_path / "node.log")
    until = time.monotonic() + 15
    while process.alive:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert process.last_log_line == expected

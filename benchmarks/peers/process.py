"""This side of the conversation with the peers: starting them, asking for rounds, leaving nothing of them behind."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType

from peers.workload import DEVICE

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
MARK = "FEDHM_BENCHMARK_PEER"  # in the environment of all processes that come of a peer, wherever they were moved to


class Peer:
    """A process that does a round when it is told to, on a device."""

    def __init__(self, command: list[str], device: str = "cpu") -> None:
        # pfl writes to the folder it runs in
        self._folder = tempfile.TemporaryDirectory(prefix="peer", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._log = folder / "log"
        self._mark = uuid.uuid4().hex
        paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"TMPDIR": str(folder), "FLWR_HOME": str(folder), "PYTHONPATH": os.pathsep.join(paths), MARK: self._mark}
        own |= {DEVICE: device, "PFL_PYTORCH_DEVICE": device}
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env={**os.environ, **QUIET, **own},
                start_new_session=True,
            )
        self._idle = True
        self._name = " ".join(command)

    def round(self) -> float:
        """Have the peer do a round, and return its seconds as the peer counted them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._idle = False
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._name} ended:\n{self._log.read_text(encoding='utf-8')[-3000:]}")
        self._idle = True
        return float(json.loads(answer)["seconds"])

    def cpu_seconds(self) -> float:
        """Return the seconds of CPU that the peer's processes have taken so far; 0 where there is no /proc."""
        return sum(_cpu_seconds(pid) for pid in _processes() if self._made(pid))

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the peer to stop by closing its stdin; whatever is left after some seconds is killed."""
        try:
            assert self._process.stdin
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            if self._idle:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=20)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            while left := [pid for pid in _processes() if self._made(pid)]:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            self._folder.cleanup()

    def _made(self, pid: int) -> bool:
        try:
            return f"{MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone, or somebody else's
            return False


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # gone
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _processes() -> list[int]:
    """Return all processes; none where there is no /proc, so that what Ray started is left to end by itself."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]

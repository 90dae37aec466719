"""`fedhm run` and `fedhm resume` on Flower: submit the run to a SuperLink, and show its progress until it has ended.

Flower starts the process that runs the rounds. That process reports its progress through a small status file
(`StatusFile`), and `run_on_flower` reads it.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.flower.deployment import connection_of
from fedhm.flower.processes.secrets import current_umask
from fedhm.flower.processes.superlink import Connection, run_status, simulation_superlink, start_run, stop_run
from fedhm.machine.files import is_locked, take_lock
from fedhm.runs.folder import how_to_resume
from fedhm.runs.rounds import read_records
from fedhm.server.callbacks import Watcher
from fedhm.server.record import Record

APP = Path(__file__).with_name("preset_app")
POLL_SECONDS = 0.2  # between two looks at the status file
ASK_FLOWER_AFTER = 10.0  # seconds without a status file after which Flower is asked for the state of the run
START_TIMEOUT = 300.0  # seconds within which a run must have started, and have written its status file if it runs
STOP_TIMEOUT = 20.0  # seconds that a stopped run has to end

Status = dict[str, Any]


class StatusFile:
    """A watcher that keeps a status file up to date. It holds a lock on the file while its process lives."""

    def __init__(self, path: Path) -> None:
        self._path, self._status = path, {"state": "waiting"}
        self._lock = take_lock(_lock_path(path), wait=-1)  # a caller of `is_gone` holds it for a moment
        self._write()

    def started(self, done: int, rounds: int) -> None:
        self._write(state="running", started_at=done, done=done, rounds=rounds)

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        self._write(task=[round_number, what, done, of])

    def round_done(self, record: Record) -> None:
        self._write(done=record.round)

    def message(self, sentence: str) -> None:
        self._write(message=sentence)

    def ended(self, error: str = "", *, unforeseen: bool = False) -> None:
        self._write(state="ended", error=error, unforeseen=unforeseen)

    def _write(self, **changes: Any) -> None:
        self._status = {**self._status, **changes}
        with suppress(OSError):  # the reader may be gone, and the file's folder with it
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._status), encoding="utf-8")
            new.replace(self._path)


def read_status(path: Path) -> Status | None:
    """Return the content of a status file; None until the process has begun."""
    try:
        status: Status = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return status


def is_gone(path: Path) -> bool:
    """Tell whether the process that wrote the status file has ended, in whichever way."""
    return not is_locked(_lock_path(path))


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")


def run_on_flower(config: Config, out: Path, watcher: Watcher, say: Callable[[str], None]) -> None:
    """Run the remaining rounds of `config`. Flower's processes write the folder `out`; this process watches."""
    with TemporaryDirectory(prefix="fedhm-") as scratch, _superlink(config, Path(scratch), say) as connection:
        status_file = Path(scratch) / "status.json"
        settings: dict[str, str | int | float | bool] = {
            "config": config.to_toml(),
            "out": str(out.absolute()),
            "status": str(status_file),
            "umask": oct(current_umask()),
            "node-keys": connection.encrypted,
        }
        simulation = "" if config.engine.superlink else _simulation_options(config)
        say("submitting the run to Flower …")
        run_id = start_run(connection, APP, settings, simulation)
        say("waiting for its processes, which have PyTorch to import …")
        try:
            _watch(connection, run_id, status_file, out, watcher, say)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                say("stopping the run …")
            if config.engine.superlink and not (read_status(status_file) and is_gone(status_file)):
                with suppress(FedhmError):  # if the SuperLink is gone, the first error is the one to show
                    stop_run(connection, run_id)  # a simulation ends with its SuperLink
                _wait_for_end(status_file)
            raise


@contextmanager
def _superlink(config: Config, scratch: Path, say: Callable[[str], None]) -> Iterator[Connection]:
    if config.engine.superlink:
        yield connection_of(config.engine.superlink)
        return
    say("starting a simulation …")
    with simulation_superlink(scratch) as connection:
        yield connection


def _simulation_options(config: Config) -> str:
    """Return options for one node per client, of which as many work at a time as there are cores."""
    return f"num-supernodes={config.federation.clients} client-resources-num-cpus={config.engine.threads}"


def _watch(
    connection: Connection, run_id: int, status_file: Path, out: Path, watcher: Watcher, say: Callable[[str], None]
) -> None:
    """Pass the progress of a run on to `watcher` and `say` until it has ended; raise if it failed."""
    _wait_for_start(connection, run_id, status_file)
    shown, message, task = -1, "", None
    while True:
        gone, status = is_gone(status_file), read_status(status_file)  # in this order: its last words are not missed
        assert status is not None
        if status.get("message", "") != message:
            message = status["message"]
            say(message)
        if "rounds" in status:
            if shown < 0:
                shown = status["started_at"]
                watcher.started(shown, status["rounds"])
            if status.get("task") not in (None, task):
                task = status["task"]
                watcher.task_done(*task)
            if status["done"] > shown:
                for record in read_records(out / "records.jsonl")[shown : status["done"]]:
                    watcher.round_done(record)
                shown = status["done"]
        if status["state"] == "ended":
            if status["error"]:
                raise FedhmError(status["error"] + (_resume_hint(out) if status["unforeseen"] else ""))
            return
        if gone:
            raise FedhmError(f"{_death_reason(connection)}{_resume_hint(out)}")
        time.sleep(POLL_SECONDS)


def _wait_for_start(connection: Connection, run_id: int, status_file: Path) -> None:
    started = asked = time.monotonic()
    while read_status(status_file) is None:
        connection.check()
        time.sleep(POLL_SECONDS)
        if time.monotonic() < asked + ASK_FLOWER_AFTER:
            continue
        asked = time.monotonic()
        state = run_status(connection, run_id)
        if state.startswith("finished"):
            raise FedhmError(f"Flower could not start the run (it is '{state}'): see 'flwr log {run_id} --show'")
        if asked < started + START_TIMEOUT:
            continue
        if state == "pending":
            raise FedhmError(
                f"nothing has started the run within {START_TIMEOUT / 60:.0f} minutes: the executor of the SuperLink "
                "(flower-superexec) may have died; see the SuperLink's log, and start the SuperLink again"
            )
        if state == "running":
            raise FedhmError("the run's server process is on another machine: 'fedhm run' must be started on that one")


def _death_reason(connection: Connection) -> str:
    try:
        connection.check()
    except FedhmError as error:
        return str(error)
    return "the run's server process died"


def _resume_hint(out: Path) -> str:
    return how_to_resume(out) if (out / "config.toml").exists() else ""


def _wait_for_end(status_file: Path) -> None:
    until = time.monotonic() + STOP_TIMEOUT
    while not is_gone(status_file) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)

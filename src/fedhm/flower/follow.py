"""How the process that runs the loop, which Flower starts, tells the one that was asked for it how it goes."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.flower.processes.fleet import connection_of
from fedhm.flower.processes.process import check_installed
from fedhm.flower.processes.secrets import current_umask
from fedhm.flower.processes.superlink import Connection, simulation_superlink, status, stop, submit
from fedhm.machine.files import is_locked, take_lock
from fedhm.runs.folder import how_to_resume
from fedhm.runs.records import read_records
from fedhm.server.callbacks import Watcher
from fedhm.server.record import Record

Status = dict[str, Any]


class StatusFile:
    """A watcher that keeps a small file up to date. Its lock is held as long as the process lives."""

    def __init__(self, path: Path) -> None:
        self._path, self._status = path, {"state": "waiting"}
        self._lock = take_lock(_lock_of(path), wait=-1)  # whoever asks `is_gone` holds it for a moment
        self._write()

    def started(self, done: int, rounds: int) -> None:
        self._write(state="running", started_at=done, done=done, rounds=rounds)

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        self._write(task=[round_number, what, done, of])

    def round_done(self, record: Record) -> None:
        self._write(done=record.round)

    def said(self, sentence: str) -> None:
        self._write(said=sentence)

    def ended(self, error: str = "", *, unforeseen: bool = False) -> None:
        self._write(state="ended", error=error, unforeseen=unforeseen)

    def _write(self, **news: Any) -> None:
        self._status = {**self._status, **news}
        with suppress(OSError):  # whoever asked may be gone, with the file's folder
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._status))
            new.replace(self._path)


def read_status(path: Path) -> Status | None:
    """Return what the status file says; None until the process has begun."""
    try:
        status: Status = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return status


def is_gone(path: Path) -> bool:
    """Tell whether the process that wrote the status file has ended, in whichever way."""
    return not is_locked(_lock_of(path))


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


# `fedhm run` and `fedhm resume` on Flower: the run is submitted to a SuperLink, and shown until it has ended.

APP = Path(__file__).with_name("preset_app")
PAUSE = 0.2  # seconds between two looks
ASK_AFTER = 10.0  # seconds without a sign of life after which Flower is asked what became of the run
SILENCE = 300.0  # seconds after which a run must have been started, and have given a sign of life if it runs
LAST_BREATH = 20.0  # seconds that a stopped run has to end


def run_on_flower(config: Config, out: Path, watcher: Watcher, say: Callable[[str], None]) -> None:
    """Run what is left of `config` in the folder `out`. Flower's processes write the folder; this one watches."""
    check_installed()
    with TemporaryDirectory(prefix="fedhm-") as scratch, _superlink(config, Path(scratch), say) as connection:
        news = Path(scratch) / "status.json"
        settings: dict[str, str | int | float | bool] = {
            "config": config.to_toml(),
            "out": str(out.absolute()),
            "status": str(news),
            "umask": oct(current_umask()),
            "node-keys": connection.encrypted,
        }
        simulated = "" if config.engine.superlink else _simulation(config)
        say("submitting the run to Flower …")
        run_id = submit(connection, APP, settings, simulated)
        say("waiting for its processes, which have PyTorch to import …")
        try:
            _follow(connection, run_id, news, out, watcher, say)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                say("stopping the run …")
            if config.engine.superlink and not (read_status(news) and is_gone(news)):
                with suppress(FedhmError):  # of a SuperLink that is gone: what happened first is said
                    stop(connection, run_id)  # a simulation ends with its SuperLink
                _wait_for_its_end(news)
            raise


@contextmanager
def _superlink(config: Config, scratch: Path, say: Callable[[str], None]) -> Iterator[Connection]:
    with ExitStack() as stack:
        if config.engine.superlink:
            yield connection_of(config.engine.superlink)
        else:
            say("starting a simulation …")
            yield stack.enter_context(simulation_superlink(scratch))


def _simulation(config: Config) -> str:
    """Return options for as many nodes as clients, of which as many work at a time as there are cores for."""
    return f"num-supernodes={config.federation.clients} client-resources-num-cpus={config.engine.threads}"


def _follow(
    connection: Connection, run_id: int, news: Path, out: Path, watcher: Watcher, say: Callable[[str], None]
) -> None:
    _wait_for_its_beginning(connection, run_id, news)
    shown, said, task = -1, "", None
    while True:
        gone, now = is_gone(news), read_status(news)  # in this order: what it wrote last is not missed
        assert now is not None
        if now.get("said", "") != said:
            said = now["said"]
            say(said)
        if "rounds" in now:
            if shown < 0:
                shown = now["started_at"]
                watcher.started(shown, now["rounds"])
            if now.get("task") not in (None, task):
                task = now["task"]
                watcher.task_done(*task)
            if now["done"] > shown:
                for record in read_records(out / "records.jsonl")[shown : now["done"]]:
                    watcher.round_done(record)
                shown = now["done"]
        if now["state"] == "ended":
            if now["error"]:
                raise FedhmError(now["error"] + (_where_to_go_on(out) if now["unforeseen"] else ""))
            return
        if gone:
            raise FedhmError(f"{_why_it_died(connection)}{_where_to_go_on(out)}")
        time.sleep(PAUSE)


def _wait_for_its_beginning(connection: Connection, run_id: int, news: Path) -> None:
    started = asked = time.monotonic()
    while read_status(news) is None:
        connection.check()
        time.sleep(PAUSE)
        if time.monotonic() < asked + ASK_AFTER:
            continue
        asked = time.monotonic()
        state = status(connection, run_id)
        if state.startswith("finished"):
            raise FedhmError(f"Flower could not start the run (it is '{state}'): see 'flwr log {run_id} --show'")
        if asked < started + SILENCE:
            continue
        if state == "pending":
            raise FedhmError(
                f"nothing has started the run within {SILENCE / 60:.0f} minutes: the executor of the SuperLink "
                "(flower-superexec) may have died; see the SuperLink's log, and start the SuperLink again"
            )
        if state == "running":
            raise FedhmError("the run's server process is on another machine: 'fedhm run' must be started on that one")


def _why_it_died(connection: Connection) -> str:
    try:
        connection.check()
    except FedhmError as error:
        return str(error)
    return "the run's server process died"


def _where_to_go_on(out: Path) -> str:
    return how_to_resume(out) if (out / "config.toml").exists() else ""


def _wait_for_its_end(news: Path) -> None:
    until = time.monotonic() + LAST_BREATH
    while not is_gone(news) and time.monotonic() < until:
        time.sleep(PAUSE)

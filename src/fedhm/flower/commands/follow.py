"""`fedhm run` and `fedhm resume` on Flower: the run is submitted to a SuperLink, and shown until it has ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fedhm.config.settings import Config
from fedhm.errors import FedhmError
from fedhm.flower.commands.status import is_gone, read_status
from fedhm.flower.processes.connection import Connection, status, stop, submit
from fedhm.flower.processes.fleet_folder import connection_of
from fedhm.flower.processes.private import current_umask
from fedhm.flower.processes.process import check_installed
from fedhm.flower.processes.superlink import simulation_superlink
from fedhm.runs.folder import how_to_resume
from fedhm.runs.records import read_records
from fedhm.server.watcher import Watcher

APP = Path(__file__).parents[1] / "preset_app"
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

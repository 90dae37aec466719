"""A federation on Flower with real SuperNodes, whose processes are killed while a run is on."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedhm.flower.deployment import DeploymentFolder
from fedhm.flower.processes.process import Process, free_ports
from fedhm.flower.processes.superlink import supernode_command
from fedhm.flower.processes.supervisor import descendants
from flower_up import Up, is_run_by
from torture.faults import Fault
from torture.locally import hit_and_compare, shuffled, undisturbed
from torture.tally import LostError, Tally, TooLateError
from torture.victim import Attempt, Victim

CLIENTS, ROUNDS = 2, 2
# A round without all of its updates does not count, so that a run that lost a client is resumed, and ends the same.
# The same holds for BatchNorm statistics, which these runs are spared to be shorter.
SETTINGS = [
    *("data.train_samples=200", "federation.participation=1.0", f"federation.clients={CLIENTS}"),
    *(f"federation.min_updates={CLIENTS}", "federation.attempts=1", "evaluation.static_from=never"),
    *("engine.threads=1", "engine.server_threads=1", "engine.name=flower", "engine.deadline=120"),
]
COMING_BACK = 150.0  # seconds: Flower refuses a key for a minute after its SuperNode was killed


def torture_deployment(scratch: Path, rng: random.Random, tally: Tally, until: float) -> None:
    """Hit runs on SuperNodes until the time has come, and by every fault at least once."""
    tally.tell("a federation on Flower comes up")
    with federation(scratch / "federation") as fleet:
        settings = [*SETTINGS, f"engine.superlink={fleet.folder.path}"]
        tally.tell("an undisturbed run on it")
        reference, pace = undisturbed(Victim(scratch / "flower-reference", settings, ROUNDS))
        faults = {
            "ServerApp killed": fleet.server_dies,
            "SuperNode killed (SIGKILL)": fleet.node_ends_by(signal.SIGKILL),
            "SuperNode ended (SIGTERM)": fleet.node_ends_by(signal.SIGTERM),
        }
        deck, number = shuffled(faults, rng), 0
        while time.monotonic() < until or not faults.keys() <= tally.faults.keys():
            number += 1
            run = Victim(scratch / f"flower-run-{number}", settings, ROUNDS, pace)
            hit_and_compare(run, [next(deck)], rng, tally, reference)


@contextmanager
def federation(folder: Path) -> Iterator["Fleet"]:
    with Up(folder, CLIENTS) as up:
        fleet = Fleet(up.wait())
        try:
            yield fleet
        finally:
            for node in fleet.started:
                node.stop()


class Fleet:
    """The SuperNodes of a `fedhm flower up`, and those that were started in their place."""

    def __init__(self, up: Up) -> None:
        self._up, self.folder = up, DeploymentFolder(up.folder.absolute())
        self.started: list[Process] = []

    def server_dies(self, run: Victim, rng: random.Random) -> str:
        with run.start() as attempt:
            servers: list[int] = []
            attempt.until(lambda: servers.extend(self._up.pids_of("flwr-serverapp")) or servers)
            when = run.moment(attempt, rng)
            _kill(servers[-1], signal.SIGKILL)
            _must_fail(attempt, "the run's server process died")
        return when

    def node_ends_by(self, number: signal.Signals) -> Fault:
        def strike(run: Victim, rng: random.Random) -> str:
            client = rng.randrange(CLIENTS)
            with run.start() as attempt:
                attempt.until((run.folder / "config.toml").exists)  # clients are waited for until then
                when = run.moment(attempt, rng)
                _kill(self._pid(client), number)
                try:
                    _must_fail(attempt, f"of client {client}, ")
                finally:
                    self._start_again(client)
            return f"{when}, that of client {client}"

        return strike

    def _pid(self, client: int) -> int:
        words = f"flower-supernode --auth-supernode-private-key {self.folder.key(client)}"
        (pid,) = [pid for pid in descendants(os.getpid()) if is_run_by(pid, words)]
        return pid

    def _start_again(self, client: int) -> None:
        """Start a SuperNode with its key: again if it is refused, since the other is still taken for connected."""
        address = json.loads(self.folder.announcement.read_text())["address"]
        authority, key = self.folder.certificates / "ca.crt", self.folder.key(client)
        said, end = "", time.monotonic() + COMING_BACK
        while time.monotonic() < end:
            (port,) = free_ports(1)
            config = f"partition-id={client} num-partitions={CLIENTS}"
            command = supernode_command(address, authority, key, port, config)
            log = self.folder.log(f"started-{len(self.started)}")
            node = Process(f"SuperNode {client}", command, self.folder.connection.home, log)
            self.started.append(node)
            while node.alive and time.monotonic() < end:
                if log.exists() and "SuperNode ID" in log.read_text(errors="replace"):  # it was let in
                    return
                time.sleep(0.1)
            said = node.last_log_line
        raise LostError(f"SuperNode {client} does not come back: {said}")


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise TooLateError from None


def _must_fail(attempt: Attempt, words: str) -> None:
    if attempt.wait() == 0:
        raise TooLateError
    if words not in attempt.said:
        raise LostError(f"does not say what is wrong, but: {attempt.said.strip()}")

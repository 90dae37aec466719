"""`fedhm flower up`: a SuperLink and its SuperNodes on this machine, until Ctrl-C."""

import argparse
import re
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedhm.errors import FedhmError
from fedhm.flower.processes.fleet import FleetFolder
from fedhm.flower.processes.process import check_installed

if TYPE_CHECKING:
    from fedhm.flower.processes.fleet import Fleet


def up(options: argparse.Namespace, console: Console) -> None:
    node_configs = _node_configs(options.clients, options.tiers, options.memory)
    check_installed()
    from fedhm.flower.processes.fleet import started_fleet

    folder = FleetFolder(options.folder.absolute())
    with (
        _ended_by_signals(),
        console.status("") as status,
        started_fleet(folder, node_configs, options.port, not options.insecure, status.update) as running,
    ):
        status.stop()
        _explain(options.folder, running, console)
        _stay(running, console)
        console.print("ending the federation …")


def _stay(running: "Fleet", console: Console) -> None:
    try:
        while True:
            for node in running.newly_dead():
                said = f"{node.name} ended, the others go on: {node.last_words} ({node.log})"
                console.print(said, highlight=False, markup=False, soft_wrap=True)
            time.sleep(0.3)
    except KeyboardInterrupt:
        return


def _explain(folder: Path, running: "Fleet", console: Console) -> None:
    clients, where = len(running.nodes), shlex.quote(str(folder))
    superlink, *for_clients = running.commands
    for_one = for_clients[: len(for_clients) // clients]
    lines = [
        f"A SuperLink at {running.address} and {clients} SuperNode{'s' * (clients > 1)} are up. Run on them:",
        f"  fedhm run digits --set engine.name=flower engine.superlink={where} federation.clients={clients}",
        "They were started by these commands of Flower; docs/flower.md has them for several hosts:",
        f"  export FLWR_HOME={shlex.quote(str(running.folder.connection.home))}",
        *(f"  {shlex.join(command)}" for command in [superlink, *for_one]),
        *(["  … and likewise for the other clients"] if clients > 1 else []),
        f"This SuperLink also takes runs only from whoever can read {shlex.quote(str(folder / 'flower'))}.",
        f"Their logs are in {folder / 'logs'}. Ctrl-C ends them all.",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _node_configs(clients: int, tiers: Sequence[str] | None, memory: Sequence[int] | None) -> list[str]:
    if tiers and memory:
        raise FedhmError("--tiers and --memory exclude each other: a client's tier is given, or found by its memory")
    for tier in tiers or ():
        if not re.fullmatch(r"[\w./]+", tier):
            raise FedhmError(f"--tiers takes names of tiers such as full or 1/4, not '{tier}'")
    kinds = [f' tier="{tier}"' for tier in tiers or ()]
    kinds += [f" memory={megabytes}" for megabytes in memory or ()]
    return [
        f"partition-id={client} num-partitions={clients}{kinds[client % len(kinds)] if kinds else ''}"
        for client in range(clients)
    ]


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C. Another one while the children are being ended must not leave some of them behind."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

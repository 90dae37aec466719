"""Local runs, each of which is hit several times before it may end."""

import random
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from shutil import rmtree

from torture.faults import FAULTS, KILLED, ON_A_SMALL_DISK, Fault, small_disk
from torture.tally import LostError, Tally, TooLateError
from torture.victim import Pace, Victim

ROUNDS = 8
SETTINGS = [
    *("data.train_samples=400", "federation.clients=4", "federation.participation=1.0", "train.epochs=1"),
    *("evaluation.every=3", "engine.workers=2", "engine.threads=1", "engine.server_threads=1"),
]
MOST = 4  # faults of one run


def torture_local_runs(scratch: Path, rng: random.Random, tally: Tally, until: float, kills: int = 1) -> None:
    """Hit runs until the time has come, by every fault at least once, and until `kills` servers have been killed."""
    tally.tell("an undisturbed local run")
    reference, pace = undisturbed(Victim(scratch / "reference", SETTINGS, ROUNDS))
    with small_disk(scratch / "disk") as small:
        if not small:
            tally.tell("no small disk can be mounted by this user: disks are not filled, but files cannot grow")
        faults = FAULTS | ON_A_SMALL_DISK if small else FAULTS
        deck = due(faults, kills, rng, tally, until)
        number = 0
        while several := list(islice(deck, rng.randint(1, MOST))):
            number += 1
            run = Victim(scratch / "disk" / f"run-{number}", SETTINGS, ROUNDS, pace)
            hit_and_compare(run, several, rng, tally, reference)
            rmtree(run.folder, ignore_errors=True)


def due(
    faults: Mapping[str, Fault], kills: int, rng: random.Random, tally: Tally, until: float
) -> Iterator[tuple[str, Fault]]:
    """Yield faults in random order while there is time and until all have come; then kills, if these were too few."""
    deck = shuffled(faults, rng)
    while time.monotonic() < until or not faults.keys() <= tally.faults.keys():
        yield next(deck)
    while tally.times(KILLED) < kills:
        yield KILLED, faults[KILLED]


def undisturbed(run: Victim) -> tuple[Path, Pace]:
    """Do the run that all others are compared with, and see how fast it is."""
    began = time.monotonic()
    with run.start() as attempt:
        attempt.until((run.folder / "config.toml").exists)
        begin = time.monotonic() - began
        attempt.until(lambda: run.done >= run.rounds)
        rounds = time.monotonic() - began - begin
        attempt.must_succeed()
    return run.folder, Pace(begin, rounds / run.rounds)


def hit_and_compare(
    run: Victim, faults: list[tuple[str, Fault]], rng: random.Random, tally: Tally, reference: Path
) -> None:
    problem = ""
    try:
        for name, fault in faults:
            try:
                tally.struck(name, fault(run, rng))
            except TooLateError:
                tally.tell(f"{name}: the run was done before")
                break
            except LostError as error:
                tally.struck(name, str(error))
                raise
        if not finished(run):
            run.finish()
        problem = run.difference(reference)
    except LostError as error:
        problem = str(error)
    tally.ended(run.folder.name, problem)


def finished(run: Victim) -> bool:
    return (run.folder / "report.md").exists()


def shuffled(faults: Mapping[str, Fault], rng: random.Random) -> Iterator[tuple[str, Fault]]:
    """Yield all faults in random order, again and again: none is left to chance."""
    while True:
        yield from rng.sample(sorted(faults.items(), key=lambda item: item[0]), len(faults))

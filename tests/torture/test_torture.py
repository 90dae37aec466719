"""The short form of `make torture`: a small local run is hit twice, and ends as if nothing had happened."""

import random
import sys
from pathlib import Path

import pytest

from torture.faults import FAULTS, KILLED
from torture.locally import due, hit_and_compare, undisturbed
from torture.tally import Tally
from torture.victim import Victim

SETTINGS = ["data.train_samples=160", "federation.clients=2", "federation.participation=1.0", "train.epochs=1"]
SETTINGS += ["evaluation.every=4", "engine.workers=2", "engine.threads=1", "engine.server_threads=1"]
ROUNDS = 6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_run_that_was_hit_twice_ends_as_if_it_had_not(tmp_path: Path) -> None:
    said: list[str] = []
    tally, rng = Tally(said.append), random.Random(1)
    reference, pace = undisturbed(Victim(tmp_path / "reference", SETTINGS, ROUNDS))
    run = Victim(tmp_path / "run", SETTINGS, ROUNDS, pace)
    names = (KILLED, "worker killed")
    hit_and_compare(run, [(name, FAULTS[name]) for name in names], rng, tally, reference)
    assert said[-1].endswith("the same, bit for bit"), said
    assert tally.lost == 0
    assert tally.faults


def test_a_run_that_ends_otherwise_is_lost_by_all_that_was_done_to_it() -> None:
    tally = Tally(lambda _: None)
    tally.struck("one", "")
    tally.ended("first run", "")
    tally.struck("one", "")
    tally.struck("another", "")
    tally.ended("second run", "not the same: records")
    assert tally.lost == 2
    assert tally.table().splitlines()[2:] == ["| another | 1 | 1 | 0 |", "| one | 2 | 1 | 1 |", "| all | 3 | 2 | 1 |"]
    tally.ended("third run", "cannot be finished")  # and nothing had been done to it
    assert tally.lost == 3


def test_servers_are_killed_until_it_is_enough_though_the_time_is_over() -> None:
    tally = Tally(lambda _: None)
    for name, _ in due(FAULTS, 5, random.Random(0), tally, until=0.0):
        tally.struck(name, "")
    assert {name: counted.times for name, counted in tally.faults.items()} == dict.fromkeys(FAULTS, 1) | {KILLED: 5}

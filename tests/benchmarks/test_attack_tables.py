"""What is lost under attack is read off the summary of two processes' files, and of nothing that cannot be compared."""

import json
from pathlib import Path

import pytest

import forked
from attack_tables import LEFT_OUT, MERGED, Cell, summary, table

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "attacks.py"
DIGITS = {"preset": "digits", "set": ""}


def accuracies(full: float, half: float) -> dict[str, float]:
    return {"full": full, "1/2": half, MERGED: 2.0, LEFT_OUT: 0.0}


CLIP = {
    Cell("", 0, "clip"): accuracies(99.0, 98.0),
    Cell("flip", 1, "clip"): accuracies(98.5, 97.0),  # 0.75 in the mean
    Cell("alie", 1, "clip"): accuracies(97.9, 97.9),  # 0.6 in the mean, but 1.1 in one tier
}
NONE = {Cell("", 0, "none"): accuracies(99.2, 98.4), Cell("flip", 1, "none"): {}}


def named(cells: dict[Cell, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {cell.name: found for cell, found in cells.items()}


def test_the_summary_names_the_attack_that_costs_most() -> None:
    lines = summary(named(CLIP), list(CLIP)).splitlines()
    assert lines[-2:] == ["| 1 | mean over tiers | 0.8 (flip) |", "| 1 | worst tier | 1.1 (alie, full) |"]


def test_without_hostile_clients_it_is_what_the_defence_costs() -> None:
    lines = summary(named(CLIP | NONE), list(CLIP | NONE)).splitlines()
    assert lines[2:4] == ["| 0 | mean over tiers | 0.3 | 0.0 |", "| 0 | worst tier | 0.4 (1/2) | 0.0 (full) |"]


def test_a_destroyed_model_is_no_number() -> None:
    assert "| 1 | worst tier | destroyed (flip) |" in summary(named(NONE), list(NONE))
    assert "| flip | 1 | destroyed |" in table(named(NONE), list(NONE))


def test_attacks_that_were_not_run_are_not_passed_over() -> None:
    listed = [*CLIP, Cell("ipm", 1, "clip")]
    assert "| 1 | mean over tiers | 0.8 (flip, 2 of 3 attacks) |" in summary(named(CLIP), listed)


@pytest.mark.slow
def test_files_of_two_processes_make_one_table_unless_their_settings_differ(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{number}.json" for number in range(3))
    first.write_text(json.dumps({"made with": DIGITS} | named(CLIP)))
    second.write_text(json.dumps({"made with": DIGITS} | named(NONE)))
    third.write_text(json.dumps({"made with": DIGITS | {"set": "train.rounds=2"}} | named(NONE)))
    options = ("--done", "--seeds", "1", "--counts", "1", "--attacks", "flip", "--defences", "none", "clip", "--json")
    done = forked.script(SCRIPT, *options, str(first), str(second))
    assert done.returncode == 0, done.stderr
    assert "| flip | 1 | destroyed | 98.5 97.0 (2 merged) |" in done.stdout
    refused = forked.script(SCRIPT, *options, str(first), str(third))
    assert refused.returncode != 0
    assert "train.rounds=2" in refused.stderr

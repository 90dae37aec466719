"""The report tells how the models do at the clients, if they evaluate, and is as before if they do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fedhm.report import save_report
from fedhm.report.tables import report_markdown, rich_tables
from fedhm.runs.history import Run
from fedhm.server.record import ClientMetrics, Tally, Traffic
from made_runs import made_run

SIZES = {"full": 1000, "1/4": 300}


def evaluated(name: str = "classes", tiers: tuple[str, ...] = ("full", "1/4")) -> Run:
    run = made_run(name, SIZES, [{"full": 0.5, "1/4": 0.25}, {"full": 0.875, "1/4": 0.5}])
    last = replace(
        run.records[-1],
        clients={tier: at_clients(run, right, tiers) for tier, right in (("full", 3), ("1/4", 1))},
        evaluation=Traffic(8, 8, down=12_000, up=400),
    )
    return replace(run, records=[*run.records[:-1], last])


def at_clients(run: Run, right: int, tiers: tuple[str, ...]) -> ClientMetrics:
    """Four clients of four samples, of which the last has two fewer right than the others, or none."""
    tally = Tally(run.config.objective)
    for client in range(4):
        found = {"correct": right if client < 3 else max(0, right - 2), "loss": 2.0}
        sums = {name: torch.tensor(float(value)).double() for name, value in found.items()}
        tally.add(client, tiers[client % len(tiers)], 4, sums)
    return tally.result(("full", "1/4"))


def test_the_table_has_all_clients_and_those_of_each_tier() -> None:
    text = report_markdown([evaluated()])
    assert text.split("### ")[2].splitlines()[:9] == [
        "classes: accuracy at the clients, round 2",
        "",
        "| tier | at | clients | samples | accuracy | mean | median | worst tenth |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
        "| full | all | 4 | 16 | 62.50 % | 62.50 % | 75.00 % | 25.00 % |",
        "| full | full | 2 | 8 | 75.00 % | 75.00 % | 75.00 % | 75.00 % |",
        "| full | 1/4 | 2 | 8 | 50.00 % | 50.00 % | 50.00 % | 25.00 % |",
        "| 1/4 | all | 4 | 16 | 18.75 % | 18.75 % | 25.00 % | 0.00 % |",
        "| 1/4 | full | 2 | 8 | 25.00 % | 25.00 % | 25.00 % | 25.00 % |",
    ]
    assert text.rstrip().endswith("An evaluation costs a client 3.10 kB.")


def test_clients_of_one_tier_are_not_listed_twice() -> None:
    rows = report_markdown([evaluated(tiers=("full",))]).split("### ")[2].splitlines()[4:7]
    assert [row.split("|")[2].strip() for row in rows if row] == ["all", "all"]


def test_a_terminal_has_room_for_it() -> None:
    console = Console(width=80, record=True)
    for table in rich_tables([evaluated()], 80):
        console.print(table)
    assert "…" not in console.export_text()


@pytest.mark.slow
def test_plots_are_written_where_clients_evaluated(tmp_path: Path) -> None:
    plain = made_run("plain", SIZES, [{"full": 0.5, "1/4": 0.25}])
    assert not [path for path in save_report([plain], tmp_path / "a") if "clients" in path.name]
    assert report_markdown([plain]).count("###") == 1
    paths = save_report([evaluated("one"), plain, evaluated("two")], tmp_path / "b")
    assert [path.name for path in paths if "clients" in path.name] == ["accuracy-at-clients.png"]
    assert (tmp_path / "b" / "accuracy-at-clients.png").stat().st_size > 10_000

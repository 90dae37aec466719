"""Our numbers beside the paper's, against numbers computed by hand."""

import csv
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image

from fedhm.compare.results import EntryRuns
from fedhm.errors import FedhmError
from fedhm.paper.artifacts import ARTIFACTS
from fedhm.paper.numbers import FIGURE_4, TABLE_2, TABLE_8
from fedhm.paper.report import ColumnRuns, RunsReport
from made_runs import made_run

SIZES = {"full": 1000, "1/2": 500, "1/4": 300, "1/8": 100}
TIERS = list(SIZES)


def mixed(label: str, *curves: dict[str, float]) -> EntryRuns:
    return EntryRuns(label, [made_run(label, SIZES, list(curves), {"name": "fedhm"})])


def single(label: str, tier: str, curve: list[float], method: dict[str, object]) -> EntryRuns:
    return EntryRuns(label, [made_run(label, {tier: SIZES[tier]}, [{tier: value} for value in curve], method)])


def accuracies(base: float, step: float = 0.01) -> dict[str, float]:
    return {tier: base - step * place for place, tier in enumerate(TIERS)}


def report_of(name: str, entries: dict[str, list[EntryRuns | None]], target: float | None = None) -> RunsReport:
    artifact = ARTIFACTS[name]
    columns = [ColumnRuns(column, entries.get(column.key, [None])) for column in artifact.columns]
    return RunsReport(artifact, "cifar10", "iid", "paper", columns, f"{name}-x", "fedhm paper", target)


def homogeneous() -> dict[str, list[EntryRuns | None]]:
    full = single("fedavg", "full", [0.5, 0.7, 0.6], {"name": "fedavg"})
    low: list[EntryRuns | None] = [
        single(f"lowrank:{tier}", tier, [0.6, 0.65, 0.64], {"name": "fedhm", "tiers": [tier]}) for tier in TIERS[1:]
    ]
    return {"lowrank": [full, *low], "slimmed": [full, *low]}


def test_best_difference_and_last_round_stand_beside_the_papers_number() -> None:
    fedhm = mixed("fedhm-paper", accuracies(0.80), accuracies(0.95), accuracies(0.90))
    report = report_of("table2", {"fedhm-paper": [fedhm]})
    (group,) = report.accuracy_sheet().groups
    published = TABLE_2["cifar10", "iid"]["fedhm-paper"]
    for place, (row, paper) in enumerate(zip(group, published, strict=True)):
        best = 95 - place
        assert row[:2] == ["FedHM", TIERS[place]]
        assert row[4:] == [f"{paper:.2f}", f"{best:.2f}", f"{best - paper:+.2f}", f"{90 - place:.2f}"]


def test_a_column_of_ours_has_no_number_of_the_paper() -> None:
    ours = mixed("fedhm-default", accuracies(0.9))
    (group,) = report_of("table2", {"fedhm-default": [ours]}).accuracy_sheet().groups
    assert {(row[3], row[4], row[6]) for row in group} == {("–", "–", "–")}


def test_other_tiers_than_the_papers_have_no_number_beside_them() -> None:
    two = EntryRuns("heterofl", [made_run("heterofl", {"full": 10, "1/2": 5}, [{"full": 0.9, "1/2": 0.8}])])
    (group,) = report_of("table2", {"heterofl": [two]}).accuracy_sheet().groups
    assert [row[4] for row in group] == ["–", "–"]


def test_a_missing_run_leaves_the_other_rows_where_they_belong() -> None:
    entries = homogeneous()
    entries["lowrank"][1] = None
    low, _ = report_of("table8", entries).accuracy_sheet().groups
    published = TABLE_8["cifar10", "iid"]["lowrank"]
    assert [(row[1], row[4]) for row in low] == [(TIERS[n], f"{published[n]:.2f}") for n in (0, 2, 3)]


def test_pairs_of_methods_in_the_papers_order_are_counted() -> None:
    good, bad = mixed("fedhm-paper", accuracies(0.9)), mixed("heterofl", accuracies(0.8))
    assert report_of("table2", {"fedhm-paper": [good], "heterofl": [bad]}).order_agreement() == (4, 4)
    assert report_of("table2", {"fedhm-paper": [bad], "heterofl": [good]}).order_agreement() == (0, 4)
    # the full model is the same in both columns of Table 8, and our others are equal, which is no order
    assert report_of("table8", homogeneous()).order_agreement() == (0, 3)


def test_savings_are_ratios_to_the_full_model() -> None:
    report = report_of("figure4", homogeneous(), target=0.7).report()
    assert {row[1] for row in report.sheets[0].groups[0]} == {"not reached"}
    report = report_of("figure4", homogeneous()).report()  # 65 %: after two rounds of every model
    ours, (paper,) = report.sheets[0].groups
    assert [row[1:] for row in ours] == [[f"{1000 / SIZES[tier]:.1f}×"] * 2 for tier in TIERS[1:]]
    known = FIGURE_4["cifar10", "iid"]
    assert paper[1:] == [f"{known.communication:.1f}×", f"{known.computation:.1f}×"]
    assert "65 % accuracy (the largest whole percent" in report.sheets[0].note


def test_savings_need_the_full_model() -> None:
    entries = homogeneous()
    entries["lowrank"][0] = None
    with pytest.raises(FedhmError, match="relative to the full model"):
        report_of("figure4", entries).report()


@pytest.mark.parametrize("name", ["table8", "figure3", "figure4", "figure8"])
def test_every_file_is_written(name: str, tmp_path: Path) -> None:
    entries = homogeneous()
    smallest = entries["lowrank"][-1]
    report = report_of(name, {**entries, "lowrank-rank-k": [smallest]}).report()
    paths = report.save(tmp_path)
    assert {path.suffix for path in paths} == {".md", ".csv", ".html", ".png"}
    assert all(path.stat().st_size for path in paths)
    with Image.open(tmp_path / f"{name}-x.png") as picture:
        assert picture.width > 500
    rows = list(csv.reader(StringIO((tmp_path / f"{name}-x.csv").read_text())))
    assert len(rows) > 1
    assert len({len(row) for row in rows}) == 1


def test_the_convergence_figure_has_the_smallest_model_of_each_method() -> None:
    curves = [accuracies(0.5), accuracies(0.8), accuracies(0.85)]
    entries: dict[str, list[EntryRuns | None]] = {
        "fedhm-paper": [mixed("fedhm-paper", *curves)],
        "heterofl": [mixed("heterofl", *curves)],
    }
    (plot,) = report_of("figure2", entries).report().plots
    assert [line.label for line in plot.lines] == ["HeteroFL, 100", "FedHM, 100"]
    for line in plot.lines:
        assert list(line.y) == pytest.approx([47, 77, 82])

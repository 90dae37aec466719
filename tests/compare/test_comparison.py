"""The tables of a comparison, against numbers computed by hand."""

import csv
import io
import math
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from fedhm.compare.report import ComparisonReport
from fedhm.compare.results import EntryRuns, common_target, costs_to_reach, full_model
from fedhm.compare.tables import arrange_table, comparison_csv, cost_sheet, difference_sheet, metric_sheet
from fedhm.config.method import Change
from fedhm.errors import FedhmError
from fedhm.measure.cost import LayerCost
from fedhm.report.format import format_total_macs
from fedhm.report.sheets import Sheet, markdown_table, rich_table
from made_runs import made_run

DECAY = {"decay_factors": True}
LAYERS = {tier: {"conv": LayerCost(10, 100), "fc": LayerCost(5, 50)} for tier in ("full", "1/4")}


def fedhm() -> EntryRuns:
    """Final accuracies 0.80 and 0.90 with two seeds, the small tier a tenth below."""
    sizes = {"full": 1000, "1/4": 300}
    return EntryRuns(
        "fedhm",
        [
            made_run(f"fedhm-seed{seed}", sizes, [{"full": a, "1/4": a - 0.1} for a in curve], seed=seed)
            for seed, curve in ((0, (0.5, 0.7, 0.8)), (1, (0.6, 0.85, 0.9)))
        ],
    )


def one_tier(label: str, method: dict[str, object], size: int, tier: str, *curves: tuple[float, ...]) -> EntryRuns:
    return EntryRuns(
        label,
        [
            made_run(f"{label}-seed{seed}", {tier: size}, [{tier: a} for a in curve], method, seed)
            for seed, curve in enumerate(curves)
        ],
    )


def fedavg() -> EntryRuns:
    return one_tier("fedavg", {"name": "fedavg"}, 1000, "full", (0.7, 0.9, 0.95), (0.7, 0.75, 0.95))


def lowrank() -> EntryRuns:
    return one_tier("lowrank:1/4", {"name": "fedhm", "tiers": ["1/4"]}, 300, "1/4", (0.6, 0.7, 0.8), (0.6, 0.7, 0.82))


def rising(shown: str) -> str:
    """A cell of runs that are best after their last round."""
    return f"{shown} (best {shown})"


def falling() -> EntryRuns:
    """Runs that are best before their last round, each seed in another round."""
    return one_tier("falling", {"name": "fedavg"}, 1000, "full", (0.5, 0.9, 0.7), (0.8, 0.6, 0.6), (0.5, 0.85, 0.65))


def test_the_best_round_stands_beside_the_last_and_decides_nothing() -> None:
    steady = one_tier("steady", {"name": "fedavg"}, 1000, "full", (0.5, 0.6, 0.75), (0.5, 0.6, 0.66), (0.5, 0.6, 0.7))
    sheet = metric_sheet(arrange_table([falling(), steady]), seeds=3)
    # the last rounds: 70, 60 and 65 against 75, 66 and 70, so the second is ahead by 5.33 ± 0.58; the best: 90, 80, 85
    worse = "65.00 ± 5.00 (best 85.00 ± 5.00)"
    better = "70.33 ± 4.51"
    assert list(sheet.rows) == [["full", f"1.0 k: {worse}", f"1.0 k: **{better}** (best {better})"]]
    assert "Best: each run's best evaluated round" in sheet.note
    assert "the test samples themselves, which is optimistic" in sheet.note
    (row, _) = cost_sheet([falling(), steady]).rows
    assert row[-1] == worse
    assert list(difference_sheet(arrange_table([falling(), steady])).rows) == [["full", "+5.33 ± 0.58"]]


def test_settings_that_an_entry_declares_stand_below_the_table_and_in_the_settings(tmp_path: Path) -> None:
    change = Change("train", "decay_factors", True)
    runs = [
        made_run(f"own-seed{seed}", {"full": 1000}, [{"full": 0.5}], {"name": "fedavg"}, seed, train=DECAY)
        for seed in (0, 1)
    ]
    entries = [full("plain", 0.4, 0.4), EntryRuns("own", runs, [change])]
    sheet = metric_sheet(arrange_table(entries), seeds=2)
    assert sheet.note.endswith(" Other settings of own: train.decay_factors = true.")
    assert "Other settings" not in metric_sheet(arrange_table(entries[:1]), seeds=2).note
    ComparisonReport(entries, "fedhm compare", {}).save(tmp_path)
    written = (tmp_path / "comparison.md").read_text()
    assert "| own | name = fedavg" in written
    assert written.count("train.decay_factors = True") == 1
    assert written.count("train.decay_factors = False") == 1
    assert "Other settings of own" in (tmp_path / "report.html").read_text()


def test_accuracy_is_mean_and_sample_deviation_over_the_seeds() -> None:
    mean, deviation = fedhm().final("full")
    assert mean == pytest.approx(85.0)
    assert deviation == pytest.approx(math.sqrt((5.0**2 + 5.0**2) / 1))
    assert EntryRuns("one", fedhm().runs[:1]).final("full").deviation is None


def test_the_table_has_sizes_accuracies_and_shares_and_two_seeds_make_nothing_bold() -> None:
    sheet = metric_sheet(arrange_table([fedhm(), fedavg(), lowrank()]), seeds=2)
    assert sheet.columns == ["tier", "fedhm", "fedavg", "lowrank"]
    assert list(sheet.rows) == [
        # 15 and 5 ahead: 10 ± 7.07, which two seeds may do by chance
        ["full", f"1.0 k: {rising('85.00 ± 7.07')}", f"1.0 k ×2: {rising('95.00 ± 0.00')}", ""],
        ["1/4", f"300: {rising('75.00 ± 7.07')}", "", f"300 ×2: {rising('81.00 ± 1.41')}"],
    ]
    assert "mean ± deviation over 2 seeds" in sheet.note
    assert "Nothing is bold: it takes at least 3 seeds to tell a difference from chance" in sheet.note


def full(label: str, *finals: float) -> EntryRuns:
    return one_tier(label, {"name": "fedavg"}, 1000, "full", *((final,) for final in finals))


@pytest.mark.parametrize(
    ("ours", "theirs", "bold"),
    [
        ((0.5, 0.7, 0.9), (0.49, 0.69, 0.88), True),  # ahead with every seed, little as it is beside their deviations
        ((0.6, 0.6, 0.6), (0.5, 0.6, 0.5), True),  # by 6.67 ± 5.77
        ((0.6, 0.6, 0.6), (0.5, 0.65, 0.6), False),  # by 1.67 ± 7.64
        ((0.6, 0.6, 0.6), (0.6, 0.6, 0.6), False),
        ((0.9,), (0.1,), False),  # with one seed nobody knows
        ((0.9, 0.9), (0.1, 0.2), False),  # nor with two
    ],
)
def test_bold_is_what_chance_does_not_explain(ours: tuple[float, ...], theirs: tuple[float, ...], bold: bool) -> None:
    for entries in ([full("a", *ours), full("b", *theirs)], [full("b", *theirs), full("a", *ours)]):
        comparison = arrange_table(entries)
        best = comparison.best(0)
        assert (best.entry.label if best else None) == ("a" if bold else None)
        sheet = metric_sheet(comparison, seeds=len(ours))
        (row,) = sheet.rows
        assert any("**" in cell for cell in row) == bold
        told = "Bold: better than every other entry in the row by more than one standard deviation of the paired"
        assert (told in sheet.note) == (len(ours) >= 3)


def test_the_best_must_be_ahead_of_each_other_one() -> None:
    steady, wild = full("steady", 0.5, 0.5, 0.5), full("wild", 0.2, 0.7, 0.2)
    ours = full("ours", 0.6, 0.6, 0.6)
    assert arrange_table([ours, steady]).best(0) is not None
    assert arrange_table([ours, steady, wild]).best(0) is None  # wild has the lowest mean, but was once ahead by far


def test_one_seed_has_neither_deviation_nor_bold_and_says_so() -> None:
    sheet = metric_sheet(arrange_table([full("a", 0.5), full("b", 0.4)]), seeds=1)
    assert list(sheet.rows) == [["full", "1.0 k: 50.00 (best 50.00)", "1.0 k: 40.00 (best 40.00)"]]
    assert "Nothing is bold: it takes at least 3 seeds" in sheet.note


def test_differences_are_paired_by_seed() -> None:
    sheet = difference_sheet(arrange_table([fedavg(), fedhm(), lowrank()]))
    assert (sheet.title, sheet.columns) == ("Difference from fedhm", ["tier", "fedavg", "lowrank"])
    assert list(sheet.rows) == [["full", "+10.00 ± 7.07", ""], ["1/4", "", "+6.00 ± 5.66"]]
    turned = EntryRuns("a", list(full("a", 0.5, 0.6).runs)[::-1])  # in whatever order runs were read
    assert list(difference_sheet(arrange_table([full("b", 0.6, 0.7), turned])).rows) == [["full", "-10.00 ± 0.00"]]


def test_a_tier_with_several_shares_sits_in_the_last_of_its_levels() -> None:
    reference = EntryRuns(
        "fedhm", [made_run("a", dict(zip("wxyz", (90, 60, 30, 10), strict=True)), [dict.fromkeys("wxyz", 0.5)])]
    )
    method = {"name": "fedhm", "tiers": ["1/2", "1/2", "1/4", "1/8"]}
    tiers = ("1/2", "1/4", "1/8")
    v2 = EntryRuns(
        "fedhm-v2", [made_run("b", dict(zip(tiers, (60, 30, 10), strict=True)), [dict.fromkeys(tiers, 0.5)], method)]
    )
    assert v2.levels == ["1/2", "1/2", "1/4", "1/8"]
    column = arrange_table([reference, v2]).columns["fedhm-v2"]
    assert {row: (place.tier, place.shares) for row, place in column.items()} == {
        1: ("1/2", 2), 2: ("1/4", 1), 3: ("1/8", 1),
    }  # fmt: skip


def test_one_tier_entries_stand_beside_the_nearest_size_and_never_on_each_other() -> None:
    large = one_tier("other:0.9", {"name": "slimmed", "width": 0.9}, 900, "w0.9", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    small = one_tier("other:0.3", {"name": "slimmed", "width": 0.3}, 200, "w0.3", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    again = one_tier("other:0.31", {"name": "slimmed", "width": 0.31}, 210, "w0.31", (0.5,) * 3, (0.5,) * 3)
    columns = arrange_table([fedhm(), large, small, again]).columns
    assert {row: place.tier for row, place in columns["slimmed"].items()} == {0: "w0.9", 1: "w0.3"}
    assert {row: place.tier for row, place in columns["other:0.31"].items()} == {1: "w0.31"}


def test_what_each_tier_spent() -> None:
    rows = list(cost_sheet([fedhm(), fedavg()]).rows)
    # three rounds of one participant: 20 bytes and 100 MACs for each parameter; of 8 clients each had 3 · 2 / 8 turns
    of_client = ["15.00 kB", "0.1 M"]
    costs = ["1,000", "7.0 k", "20.00 kB", *of_client, "60.00 kB", "0.3 M"]
    assert rows[0] == ["fedhm", "full", *costs, rising("85.00 ± 7.07")]
    costs = ["300", "2.1 k", "6.00 kB", "4.50 kB", "0.0 M", "18.00 kB", "0.1 M"]
    assert rows[1] == ["fedhm", "1/4", *costs, rising("75.00 ± 7.07")]
    assert rows[2] == ["fedhm", "all", "", "", "", "", "", "78.00 kB", "0.4 M", ""]
    assert [row[1] for row in rows[3:]] == ["full"]
    assert format_total_macs(2.5e15) == "2,500.0 T"


def test_budgets_are_of_a_client_that_takes_its_turns() -> None:
    assert fedhm().budget("full") == (pytest.approx(0.75 * 20_000), pytest.approx(0.75 * 100_000))
    assert fedavg().budget("full") == (pytest.approx(3 / 8 * 20_000), pytest.approx(3 / 8 * 100_000))
    run = made_run("rare", {"full": 1000, "1/4": 300}, [{"full": 0.5, "1/4": 0.5}] * 4)
    for record in run.records[1:]:  # the small tier was drawn once only, which makes it no cheaper for its clients
        record.participants = [p for p in record.participants if p.tier == "full"]
        del record.traffic["1/4"]
    assert run.turns == 5 / 8
    assert EntryRuns("rare", [run]).budget("1/4") == (pytest.approx(5 / 8 * 6000), pytest.approx(5 / 8 * 30_000))
    for record in run.records:
        record.participants, record.traffic = record.participants[:1], {"full": record.traffic["full"]}
    assert EntryRuns("rare", [run]).budget("1/4") == (None, None)
    assert list(cost_sheet([EntryRuns("rare", [run])]).rows)[1][4:7] == ["–", "–", "–"]


def test_bytes_are_counted_per_client_and_not_per_task() -> None:
    run = made_run("splitmix", {"4x0.5": 100}, [{"4x0.5": 0.5}] * 2, {"name": "splitmix", "base": 0.5, "tiers": [4]})
    for record in run.records:
        record.traffic["4x0.5"].clients = 4  # one client, four base networks
    assert run.bytes_per_client("4x0.5") == 2000


def test_bytes_of_attempts_that_failed_are_nobodys_share() -> None:
    run = made_run("twice", {"full": 100}, [{"full": 0.5}] * 2)
    run.records[1].attempts = 2
    run.records[1].traffic["full"].down *= 2
    assert run.bytes_per_client("full") == 2000


def test_costs_to_reach_a_target_are_relative_to_the_full_model() -> None:
    entries = [fedhm(), fedavg(), lowrank()]
    reference = full_model(entries)
    assert reference is not None
    assert reference.label == "fedavg"
    assert full_model([lowrank()]) is None
    assert common_target(entries) == 0.7  # what the small tier of fedhm reaches with its worse seed
    reached = {(r.entry.label, r.tier): r for r in costs_to_reach(0.7, entries, reference)}
    of_fedavg = 20 * 1000  # one round with either seed
    assert reached["fedavg", "full"].communication == 1
    assert reached["fedhm", "full"].communication == pytest.approx(20 * 1300 * 2 / of_fedavg)
    assert reached["fedhm", "1/4"].communication == pytest.approx(20 * 1300 * (3 + 2) / 2 / of_fedavg)
    assert reached["lowrank:1/4", "1/4"].computation == pytest.approx(2 * 300 / 1000)
    assert {r.tier: r.communication for r in costs_to_reach(0.85, [lowrank()], reference)} == {"1/4": None}


def test_the_csv_has_plain_numbers() -> None:
    rows = list(csv.DictReader(io.StringIO(comparison_csv([fedhm()]))))
    assert list(rows[0]) == [
        "entry", "seed", "round", "tier", "parameters", "macs",
        "federation_bytes_so_far", "federation_macs_so_far", "accuracy", "loss",
    ]  # fmt: skip
    assert len(rows) == 2 * 3 * 2
    last = rows[-1]
    assert (last["entry"], last["seed"], last["round"], last["tier"]) == ("fedhm", "1", "3", "1/4")
    assert (last["parameters"], last["macs"]) == ("300", "2100")
    assert (last["federation_bytes_so_far"], last["federation_macs_so_far"]) == ("78000", "390000")
    assert float(last["accuracy"]) == pytest.approx(0.8)


@pytest.mark.slow
def test_everything_is_written_and_the_figures_show_something(tmp_path: Path) -> None:
    report = ComparisonReport([fedhm(), fedavg(), lowrank()], "fedhm compare digits", LAYERS)
    written = report.save(tmp_path)
    assert {path.name for path in written} == {
        "comparison.md", "comparison.csv", "convergence-smallest.png", "accuracy-by-communication.png",
        "accuracy-by-computation.png", "cost-to-target.png", "parameters-and-macs-by-layer.png", "report.html",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}
    for path in (path for path in written if path.suffix == ".png"):
        with Image.open(path) as picture:
            assert picture.width > 1000
            assert len(picture.convert("RGB").getcolors(2**24) or []) > 50
    text = (tmp_path / "comparison.md").read_text()
    for part in (
        "`fedhm compare digits`",
        "95.00 ± 0.00 (best",
        "### What each tier spent",
        "### Cost of 70 % accuracy",
    ):
        assert part in text
    assert r"| lowrank:1/4 | name = fedhm, tiers = \[0.25]" in text
    page = (tmp_path / "report.html").read_text()
    for part in ("Accuracy by tier and method", "95.00 ± 0.00", "What each tier spent", "Cost of 70 % accuracy"):
        assert part in page
    assert "The paper" not in page.partition("<script>")[0]
    assert page.count("<figure ") == 8  # convergence, two of communication and of computation, costs, two of layers


@pytest.mark.slow
def test_without_the_full_model_there_is_no_cost_to_a_target(tmp_path: Path) -> None:
    (tmp_path / "cost-to-target.png").write_text("of an earlier comparison")
    ComparisonReport([fedhm(), lowrank()], "…", {}).save(tmp_path)
    assert not (tmp_path / "cost-to-target.png").exists()
    assert not (tmp_path / "parameters-and-macs-by-layer.png").exists()


def test_what_cannot_be_compared_is_refused() -> None:
    short = one_tier("fedavg", {"name": "fedavg"}, 1000, "full", (0.7, 0.9), (0.7, 0.75))
    with pytest.raises(FedhmError, match=r"cannot be compared: fedhm-seed0 has train\.rounds = 3, fedavg-seed0 has 2"):
        ComparisonReport([fedhm(), short], "…", {})


def test_sheets_are_split_where_the_terminal_is_narrow() -> None:
    sheet = Sheet(["tier", "a", "b", "c c c"], [[["x", "1" * 20, "2" * 20, "**333**"]]], left=1)
    assert [part.columns for part in sheet.split(80)] == [["tier", "a", "b", "c c c"]]
    parts = sheet.split(40)
    assert [part.columns for part in parts] == [["tier", "a"], ["tier", "b", "c c c"]]
    for part in parts:
        console = Console(width=40, record=True, file=io.StringIO())
        console.print(rich_table(part))
        assert "…" not in console.export_text()
    assert [part.columns for part in sheet.without("b").split(80)] == [["tier", "a", "c c c"]]
    assert markdown_table(sheet).splitlines()[:3] == [
        "| tier | a | b | c c c |", "|---|--:|--:|--:|", f"| x | {'1' * 20} | {'2' * 20} | **333** |",
    ]  # fmt: skip

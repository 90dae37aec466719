"""Comparisons by simulated time, against numbers computed by hand."""

from pathlib import Path

import pytest

from fedhm.compare.report import ComparisonReport
from fedhm.compare.results import EntryRuns, times_to_reach
from fedhm.server.record import Simulated
from made_runs import made_run


def entry(label: str, method: dict[str, object], seconds: float, *curves: tuple[float, ...]) -> EntryRuns:
    runs = []
    for seed, curve in enumerate(curves):
        run = made_run(f"{label}-{seed}", {"full": 1000}, [{"full": value} for value in curve], method, seed)
        for record in run.records:
            record.simulated = Simulated(seconds) if seconds else None
        runs.append(run)
    return EntryRuns(label, runs)


def test_time_to_a_target_is_the_mean_over_seeds() -> None:
    fast = entry("fast", {"name": "fedavg"}, 2.0, (0.1, 0.5, 0.9), (0.6, 0.7, 0.8))
    slow = entry("slow", {"name": "fedpara"}, 30.0, (0.6, 0.7, 0.8), (0.1, 0.2, 0.3))
    found = times_to_reach(0.5, [fast, slow])
    assert [(each.entry.label, each.to_target, each.whole_run) for each in found] == [
        ("fast", pytest.approx((4 + 2) / 2), 6.0),
        ("slow", None, 90.0),
    ]


@pytest.mark.slow
def test_time_is_shown_only_where_all_runs_have_it(tmp_path: Path) -> None:
    timed = [entry(name, {"name": name}, 2.0, (0.5, 0.9)) for name in ("fedavg", "fedpara")]
    names = {path.name for path in ComparisonReport(timed, "fedhm compare", {}).save(tmp_path)}
    assert "accuracy-by-time.png" in names
    assert "### Time to 90 % accuracy" in (tmp_path / "comparison.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert "Accuracy of each method's smallest model by simulated time".replace("'", "&#39;") in page
    assert "simulated_seconds_so_far" in (tmp_path / "comparison.csv").read_text()
    mixed = [timed[0], entry("fedpara", {"name": "fedpara"}, 0.0, (0.5, 0.9))]
    names = {path.name for path in ComparisonReport(mixed, "fedhm compare", {}).save(tmp_path)}
    assert "accuracy-by-time.png" not in names
    assert not (tmp_path / "accuracy-by-time.png").exists()
    assert "by simulated time" not in (tmp_path / "report.html").read_text()
    assert "### Time to" not in (tmp_path / "comparison.md").read_text()

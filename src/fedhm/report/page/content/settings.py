"""The settings of runs side by side; what differs between them is bold."""

from collections.abc import Sequence

from fedhm.report.sheets import Sheet
from fedhm.runs.history import Run


def settings_sheet(runs: Sequence[Run]) -> Sheet:
    """Return a row for each setting, those that differ first; a private run's secret is no setting."""
    found = [{key: str(value) for key, value in run.config.dotted().items()} for run in runs]
    keys = list(dict.fromkeys(key for of_run in found for key in of_run))
    differing = [key for key in keys if len({of_run.get(key) for of_run in found}) > 1]
    same = [key for key in keys if key not in differing]
    rows = [
        [[key, *(_cell(of_run.get(key), key in differing) for of_run in found)] for key in group]
        for group in (differing, same)
        if group
    ]
    note = "In bold what differs between the runs." if len(runs) > 1 else ""
    columns = ["setting", *(run.name for run in runs)]
    return Sheet(columns, rows, left=len(columns), title="", note=note)


def _cell(value: str | None, bold: bool) -> str:
    shown = "–" if value is None else value or "(empty)"
    return f"**{shown}**" if bold else shown
